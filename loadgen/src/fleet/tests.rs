//! A fleet on real sockets: what it registers, how engines die, freeze and come back, and that nothing is left.

use std::net::TcpStream;
use std::sync::mpsc;
use std::time::Duration;

use super::*;

fn start(line: &str, registrar: Registrar) -> RunningFleet {
    let spec = FleetSpec::from_line(line).unwrap();
    RunningFleet::start(&spec, Arc::new(TextModel::shipped().unwrap()), registrar).unwrap()
}

#[test]
fn engines_die_by_schedule_and_come_back_where_they_were() {
    let directory = std::env::temp_dir().join(format!("loadgen-fleet-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let file = directory.join("workers.json");
    let line = "2 mixed blocks=64 failures=kill@0.05+0.1:1,freeze@0.1+0.05:0,error@0.12+0.05:0=0.5; mixed events=none";
    let mut fleet = start(line, Registrar::File(file.clone()));
    let addresses: Vec<_> = (0..3).map(|number| fleet.engine(number).unwrap().addr).collect();
    let listed: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(listed, fleet.records());
    assert!(listed[0]["kv_events_endpoint"].is_string() && listed[2]["kv_events_endpoint"].is_null());

    let (stop, stopped) = mpsc::channel();
    let mut seen = Vec::new();
    let count = fleet.plan.len();
    fleet
        .run(&stopped, |action| {
            if action.change == Change::Restart {
                // Killed until now: its port is closed.
                assert!(TcpStream::connect(addresses[action.engine]).is_err());
            }
            seen.push(action.change);
            if seen.len() == count {
                stop.send(()).unwrap();
            }
        })
        .unwrap();
    assert_eq!(seen.len(), 6);
    assert!(seen.contains(&Change::Fail { rate: 0.5 }) && seen.contains(&Change::Thaw));
    assert_eq!(fleet.engine(0).unwrap().faults(), Faults::default(), "all failures are over");
    assert_eq!(fleet.engine(1).unwrap().addr, addresses[1]);
    assert!(TcpStream::connect(addresses[1]).is_ok());

    drop(fleet);
    assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), "[]");
    assert!(addresses.iter().all(|address| TcpStream::connect_timeout(address, Duration::from_secs(1)).is_err()));
    std::fs::remove_dir_all(&directory).unwrap();
}
