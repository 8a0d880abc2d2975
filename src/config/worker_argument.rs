//! `--worker URL[,key=value…]` -> a registration record with the same rules as one from a registry.

use serde_json::{Map, Value, json};

use crate::worker::{EngineKind, WorkerRecord, WorkerUrl};

/// Key on the command line, member of the record, and whether it is an integer there.
const KEYS: [(&str, &str, bool); 9] = [
    ("model", "model_name", false),
    ("role", "disagg_mode", false),
    ("engine", "engine", false),
    ("id", "worker_id", false),
    ("block-size", "kv_block_size", true),
    ("dp-size", "dp_size", true),
    ("dp-rank", "dp_rank", true),
    ("kv-events", "kv_events_endpoint", false),
    ("kv-replay", "kv_replay_endpoint", false),
];

/// Parses one `--worker` value. The id defaults to the URL's `host:port`. What a registry's record would get away
/// with as a note (a block size of 0, say) is an error here: the author is at hand.
pub(super) fn parse(text: &str) -> Result<WorkerRecord, String> {
    let mut parts = text.split(',');
    let url_text = parts.next().unwrap_or("").trim();
    let url = WorkerUrl::parse(url_text).map_err(|error| error.to_string())?;
    let mut members = Map::new();
    members.insert("url".to_owned(), Value::from(url.join("")));
    let mut disaggregation = [("protocol", None), ("bootstrap", None)];
    for part in parts {
        let Some((key, value)) = part.split_once('=') else {
            return Err(format!("`{part}` is not key=value"));
        };
        let (key, value) = (key.trim(), value.trim());
        if let Some(place) = disaggregation.iter_mut().find(|(name, _)| *name == key) {
            if value.is_empty() || place.1.replace(value.to_owned()).is_some() {
                return Err(format!("`{key}` is empty or given twice"));
            }
            continue;
        }
        let Some((_, member, is_integer)) = KEYS.iter().find(|(name, ..)| *name == key) else {
            let known: Vec<_> = KEYS.iter().map(|(name, ..)| *name).chain(["protocol", "bootstrap"]).collect();
            return Err(format!("unknown key `{key}`; known: {}", known.join(", ")));
        };
        if value.is_empty() {
            return Err(format!("`{key}` is empty; leave it out instead"));
        }
        if key == "engine" && EngineKind::from_name(value) == EngineKind::Unknown {
            return Err(format!("unknown engine `{value}`; known: sglang, vllm, atom; without one it is asked"));
        }
        let value = if *is_integer {
            Value::from(value.parse::<i64>().map_err(|_| format!("`{key}={value}` is not an integer"))?)
        } else {
            Value::from(value)
        };
        if members.insert((*member).to_owned(), value).is_some() {
            return Err(format!("`{key}` is given twice"));
        }
    }
    match disaggregation.map(|(_, value)| value) {
        [None, None] => {}
        [Some(protocol), bootstrap] => {
            let params = bootstrap.map_or_else(|| json!({}), |address| json!({"bootstrap_addr": address}));
            members.insert("disagg_meta".to_owned(), json!({"protocol": protocol, "params": params}));
        }
        [None, Some(_)] => return Err("`bootstrap` needs `protocol`".to_owned()),
    }
    if !members.contains_key("worker_id") {
        members.insert("worker_id".to_owned(), Value::from(url.authority));
    }
    let parsed = WorkerRecord::from_value(Value::Object(members)).map_err(|error| error.to_string())?;
    match parsed.notes.is_empty() {
        true => Ok(parsed.record),
        false => Err(parsed.notes.join("; ")),
    }
}
