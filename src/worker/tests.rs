//! Record and URL rules as tables.

use serde_json::json;

use super::*;

fn parse(value: serde_json::Value) -> Result<ParsedRecord, String> {
    WorkerRecord::parse(value.to_string().as_bytes()).map_err(|error| error.to_string())
}

#[test]
fn full_record_of_the_registry() {
    let parsed = parse(json!({"worker_id":"10.0.0.5:30000","url":"http://10.0.0.5:30000","model_name":"glm-5.3",
        "engine":"sglang","disagg_mode":"prefill",
        "disagg_meta":{"protocol":"sglang-bootstrap","params":{"bootstrap_addr":"10.0.0.5:30001"}},
        "kv_events_endpoint":"tcp://10.0.0.5:52613","kv_block_size":64,"dp_rank":null,"dp_size":null,
        "request_transport":"http","kv":{"tiers":[]},"a_member_of_next_year":[1,2]}))
    .expect("the registry's own example");
    let record = parsed.record;
    assert_eq!(parsed.notes, Vec::<String>::new());
    assert_eq!((record.worker_id.as_str(), record.model_name.as_str()), ("10.0.0.5:30000", "glm-5.3"));
    assert_eq!((record.disagg_mode, record.engine_kind()), (Role::Prefill, EngineKind::Sglang));
    assert_eq!(record.disagg_meta.as_ref().unwrap()["params"]["bootstrap_addr"], "10.0.0.5:30001");
    assert_eq!((record.kv_block_size, record.dp_rank, record.dp_size), (Some(64), None, None));
    assert!(record.is_active() && !record.is_rank_multiplexed());
    // Written out again it is the registry's form, without members of ours.
    let written = serde_json::to_value(&record).unwrap();
    assert_eq!(written["disagg_mode"], "prefill");
    assert!(written.get("kv_replay_endpoint").is_none());
    assert_eq!(serde_json::from_value::<WorkerRecord>(written).unwrap(), record);
}

/// A worker stands in the pool of each of its names once.
#[test]
fn a_further_name_counts_once() {
    let parsed = parse(json!({"worker_id":"w","url":"http://h:1","model_name":"m",
        "further_model_names":["n","m","n","",7,"o"]}))
    .expect("names that cannot be used cost only themselves");
    assert_eq!(parsed.record.model_names().collect::<Vec<_>>(), ["m", "n", "o"]);
    assert_eq!(parsed.notes, ["`further_model_names`: 4 of 6 names ignored"]);
}

#[test]
fn defaults_of_absent_members() {
    let record = parse(json!({"worker_id":"w","url":"http://h:1"})).unwrap().record;
    assert_eq!(record, WorkerRecord::new("w", "http://h:1"));
    assert_eq!((record.status.as_str(), record.request_transport.as_str()), ("active", "http"));
}

#[test]
fn nulls_are_refused_exactly_where_a_member_is_not_optional() {
    for name in ["worker_id", "url", "model_name", "engine", "status", "disagg_mode", "request_transport"] {
        let mut value = json!({"worker_id":"w","url":"http://h:1"});
        value[name] = serde_json::Value::Null;
        let error = parse(value).expect_err(name);
        assert!(error.contains(&format!("`{name}` is null")), "{name}: {error}");
    }
    for name in ["disagg_meta", "kv_events_endpoint", "kv_block_size", "dp_rank", "dp_size", "kv"] {
        let mut value = json!({"worker_id":"w","url":"http://h:1"});
        value[name] = serde_json::Value::Null;
        assert_eq!(parse(value).expect(name).record, WorkerRecord::new("w", "http://h:1"), "{name}");
    }
}

#[test]
fn bad_values_name_their_member() {
    for (name, value, expected) in [
        ("worker_id", json!(""), "`worker_id`: is empty"),
        ("worker_id", json!(7), "`worker_id` is a number, expected a string"),
        ("worker_id", json!("a\nb"), "control characters"),
        ("worker_id", json!("h:1#dp0"), "#dp"),
        ("url", json!("h:1"), "`url`"),
        ("model_name", json!(["m"]), "`model_name` is an array"),
        ("disagg_mode", json!("Prefill"), "`disagg_mode`: `Prefill` is not one of"),
        ("kv_block_size", json!("16"), "`kv_block_size` is a string, expected an integer"),
        ("kv_block_size", json!(16.5), "`kv_block_size` is a number, expected an integer"),
        ("dp_size", json!(1025), "above the cap of 1024"),
        ("dp_size", json!(18446744073709551615u64), "above the cap"),
        ("dp_rank", json!(-1), "`dp_rank`: -1"),
        ("dp_rank", json!(1024), "`dp_rank`: 1024"),
        ("kv_events_endpoint", json!(5557), "`kv_events_endpoint` is a number"),
    ] {
        let mut record = json!({"worker_id":"w","url":"http://h:1"});
        record[name] = value.clone();
        let error = parse(record).expect_err(&format!("{name} = {value}"));
        assert!(error.contains(expected), "{name} = {value}: {error}");
    }
    for (text, expected) in [
        ("", "not JSON"),
        ("{\"worker_id\":", "not JSON"),
        ("[]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("{\"url\":\"http://h:1\"}", "`worker_id` is missing"),
        ("{\"worker_id\":\"w\"}", "`url` is missing"),
        ("{\"worker_id\":\"w\",\"url\":\"http://h:1\"} x", "not JSON"),
    ] {
        let error = WorkerRecord::parse(text.as_bytes()).expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    assert!(WorkerRecord::parse(b"\xff\xfe{}").is_err());
}

#[test]
fn senseless_cache_members_cost_the_cache_not_the_worker() {
    for (name, value) in [
        ("kv_block_size", json!(0)),
        ("kv_block_size", json!(-16)),
        ("kv_block_size", json!(4294967312u64)),
        ("dp_size", json!(0)),
        ("dp_size", json!(-2)),
        ("kv_events_endpoint", json!("tcp://*:5557")),
        ("kv_events_endpoint", json!("tcp://0.0.0.0:5557")),
        ("kv_events_endpoint", json!("tcp://h")),
        ("kv_events_endpoint", json!("tcp://h:99999")),
        ("kv_events_endpoint", json!("udp://h:1")),
    ] {
        let mut record = json!({"worker_id":"w","url":"http://h:1"});
        record[name] = value.clone();
        let parsed = parse(record).unwrap_or_else(|error| panic!("{name} = {value}: {error}"));
        assert_eq!(parsed.record, WorkerRecord::new("w", "http://h:1"), "{name} = {value}");
        assert_eq!(parsed.notes.len(), 1, "{name} = {value}");
        assert!(parsed.notes[0].contains(name), "{:?}", parsed.notes);
    }
    // An empty endpoint is how some launchers say "none".
    assert_eq!(parse(json!({"worker_id":"w","url":"http://h:1","kv_events_endpoint":""})).unwrap().notes.len(), 0);
}

#[test]
fn ranks() {
    for (dp_rank, dp_size, ranks) in
        [(None, None, 1), (None, Some(1), 1), (None, Some(4), 4), (Some(2), Some(4), 1), (Some(0), None, 1)]
    {
        let mut record = WorkerRecord::new("w", "http://h:1");
        (record.dp_rank, record.dp_size) = (dp_rank, dp_size);
        assert_eq!(record.rank_count(), ranks, "{dp_rank:?} {dp_size:?}");
    }
}

#[test]
fn urls_are_taken_apart_once() {
    for (text, host, port, authority, base_path) in [
        ("http://10.0.0.5:8000", "10.0.0.5", 8000, "10.0.0.5:8000", ""),
        ("http://10.0.0.5:8000/", "10.0.0.5", 8000, "10.0.0.5:8000", ""),
        ("HTTP://Engine-1.Example:8000", "engine-1.example", 8000, "engine-1.example:8000", ""),
        ("http://[fd00::5]:8000", "fd00::5", 8000, "[fd00::5]:8000", ""),
        ("http://[FD00:0:0:0::5]:8000/", "fd00::5", 8000, "[fd00::5]:8000", ""),
        ("http://[::1]", "::1", 80, "[::1]:80", ""),
        ("http://h", "h", 80, "h:80", ""),
        ("http://h:8000/engines/a", "h", 8000, "h:8000", "/engines/a"),
        ("http://h:8000/engines/a/", "h", 8000, "h:8000", "/engines/a"),
        (" http://h:8000 ", "h", 8000, "h:8000", ""),
        ("https://h", "h", 443, "h:443", ""),
        ("HTTPS://[::1]:8443/p/", "::1", 8443, "[::1]:8443", "/p"),
    ] {
        let url = WorkerUrl::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(
            (url.host.as_str(), url.port, url.authority.as_str(), url.base_path.as_str()),
            (host, port, authority, base_path),
            "{text}"
        );
    }
    assert_eq!(WorkerUrl::parse("https://h/p").unwrap().join("/v1/models"), "https://h:443/p/v1/models");
    assert_eq!(WorkerUrl::parse("http://[::1]:9/").unwrap().join("/v1/models"), "http://[::1]:9/v1/models");
    assert_eq!(WorkerUrl::parse("http://h:9/p/").unwrap().join("/v1/models"), "http://h:9/p/v1/models");
    assert_eq!(WorkerUrl::parse("http://[::1]:9").unwrap().literal_address(), "[::1]:9".parse().ok());
    assert_eq!(WorkerUrl::parse("http://name:9").unwrap().literal_address(), None);
}

#[test]
fn b41_urls_that_would_connect_elsewhere_are_refused() {
    for (text, expected) in [
        ("http://10.0.0.5:8000@1", "user name"),
        ("http://user:secret@h:8000", "user name"),
        ("http://@h:8000", "user name"),
        ("tcp://h:8000", "scheme `tcp`"),
        ("10.0.0.5:8000", "write http://HOST:PORT"),
        ("localhost:8000", "no scheme"),
        ("http://fd00::5:8000", "not a URL"),
        ("http://h:99999", "not a URL"),
        ("http://h:0", "no usable host or port"),
        ("http://", "not a URL"),
        ("http://h:1/?x=1", "query"),
        ("http://h:1#f", "query or fragment"),
        ("", "not a URL"),
    ] {
        let error = WorkerUrl::parse(text).expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn event_endpoints() {
    for good in ["tcp://10.0.0.5:5557", "tcp://engine-1:5557", "tcp://[fd00::5]:5557", "ipc:///tmp/x", "inproc://x"] {
        assert_eq!(check_events_endpoint(good), Ok(()), "{good}");
    }
    for bad in [
        "5557",
        "tcp://",
        "tcp://h",
        "tcp://:5557",
        "tcp://h:",
        "tcp://h:0",
        "tcp://h:x",
        "tcp://*:5557",
        "tcp://[::]:1",
        "tcp://fd00::5:5557",
        "tcp://u@h:1",
        "http://h:5557",
    ] {
        assert!(check_events_endpoint(bad).is_err(), "{bad}");
    }
}

#[test]
fn damaged_records_are_errors_or_records_never_panics() {
    let whole = br#"{"worker_id":"w","url":"http://[::1]:1/p","disagg_mode":"decode","kv_block_size":16,"dp_size":4,"kv_events_endpoint":"tcp://[::1]:5557"}"#;
    assert!(WorkerRecord::parse(whole).is_ok());
    for cut in 0..whole.len() {
        assert!(WorkerRecord::parse(&whole[..cut]).is_err(), "cut at {cut}");
    }
    // Every byte replaced by every other: whatever is accepted still has a usable URL and numbers in range.
    for place in 0..whole.len() {
        for byte in 0..=255 {
            let mut damaged = whole.to_vec();
            damaged[place] = byte;
            if let Ok(parsed) = WorkerRecord::parse(&damaged) {
                assert!(parsed.record.endpoint().is_ok(), "{:?}", parsed.record);
                assert!(parsed.record.kv_block_size != Some(0) && parsed.record.rank_count() <= 1024);
            }
        }
    }
}
