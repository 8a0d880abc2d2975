//! JSON -> [`WorkerRecord`], with the exact rules of the registry: which members may be absent, which may be
//! null, and what a value outside its range does. A bad record is an error here; skipping and counting it is
//! the caller's.

use serde_json::{Map, Value};

use super::{UrlError, WorkerRecord, WorkerUrl, check_events_endpoint};
use crate::limits;

/// Longest worker id that is accepted, bytes: it becomes a metric label and part of a log line.
const WORKER_ID_BYTES_MAX: usize = 512;

/// Why a record was skipped. Every case names the member at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("not JSON: {0}")]
    Json(String),
    #[error("not a JSON object")]
    NotAnObject,
    #[error("`{0}` is missing")]
    Missing(&'static str),
    #[error("`{0}` is null; leave it out instead")]
    Null(&'static str),
    #[error("`{0}` is {1}, expected {2}")]
    Type(&'static str, &'static str, &'static str),
    #[error("`{0}`: {1}")]
    Value(&'static str, String),
    #[error("`url`: {0}")]
    Url(#[from] UrlError),
}

/// A record that is good enough to use, and what had to be left out of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedRecord {
    pub record: WorkerRecord,
    /// Members that were ignored because their value makes no sense, with the reason; for the log.
    pub notes: Vec<String>,
}

impl WorkerRecord {
    /// Parses one registration record (UTF-8 JSON).
    pub fn parse(bytes: &[u8]) -> Result<ParsedRecord, RecordError> {
        let value: Value = serde_json::from_slice(bytes).map_err(|error| RecordError::Json(error.to_string()))?;
        WorkerRecord::from_value(value)
    }

    /// The same from a parsed value, for files that hold many records.
    pub fn from_value(value: Value) -> Result<ParsedRecord, RecordError> {
        let Value::Object(mut members) = value else { return Err(RecordError::NotAnObject) };
        let mut notes = Vec::new();
        let members = &mut members;
        let worker_id = required(members, "worker_id")?;
        check_worker_id(&worker_id)?;
        let url = required(members, "url")?;
        WorkerUrl::parse(&url)?;
        let mut record = WorkerRecord::new(worker_id, url);
        for (name, target) in [
            ("model_name", &mut record.model_name),
            ("engine", &mut record.engine),
            ("status", &mut record.status),
            ("request_transport", &mut record.request_transport),
        ] {
            if let Some(text) = text(members, name)? {
                *target = text;
            }
        }
        record.further_model_names = further_model_names(members, &record.model_name, &mut notes);
        if let Some(role) = text(members, "disagg_mode")? {
            record.disagg_mode = role.parse().map_err(|()| {
                RecordError::Value("disagg_mode", format!("`{role}` is not one of mixed, prefill, decode"))
            })?;
        }
        record.disagg_meta = members.shift_remove("disagg_meta").filter(|meta| !meta.is_null());
        record.kv_events_endpoint = events_endpoint(members, "kv_events_endpoint", &mut notes)?;
        record.kv_replay_endpoint = events_endpoint(members, "kv_replay_endpoint", &mut notes)?;
        record.default_chat_template_kwargs = template_arguments(members, &mut notes);
        record.kv_block_size = block_size(members, &mut notes)?;
        record.dp_size = dp_size(members, &mut notes)?;
        record.dp_rank = dp_rank(members)?;
        Ok(ParsedRecord { record, notes })
    }
}

impl TryFrom<Value> for WorkerRecord {
    type Error = RecordError;

    fn try_from(value: Value) -> Result<Self, RecordError> {
        WorkerRecord::from_value(value).map(|parsed| parsed.record)
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A member that may be absent but not null.
fn text(members: &mut Map<String, Value>, name: &'static str) -> Result<Option<String>, RecordError> {
    match members.shift_remove(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Null) => Err(RecordError::Null(name)),
        Some(other) => Err(RecordError::Type(name, kind(&other), "a string")),
    }
}

fn required(members: &mut Map<String, Value>, name: &'static str) -> Result<String, RecordError> {
    text(members, name)?.ok_or(RecordError::Missing(name))
}

/// A member that may be absent or null.
fn integer(members: &mut Map<String, Value>, name: &'static str) -> Result<Option<i64>, RecordError> {
    match members.shift_remove(name) {
        None | Some(Value::Null) => Ok(None),
        // Out of i64 is out of every range below; saturate so that the range check names it.
        Some(Value::Number(number)) if number.is_i64() || number.is_u64() => {
            Ok(Some(number.as_i64().unwrap_or(i64::MAX)))
        }
        Some(other) => Err(RecordError::Type(name, kind(&other), "an integer")),
    }
}

fn check_worker_id(id: &str) -> Result<(), RecordError> {
    let problem = if id.is_empty() {
        "is empty"
    } else if id.len() > WORKER_ID_BYTES_MAX {
        "is longer than 512 bytes"
    } else if id.chars().any(char::is_control) {
        "has control characters"
    } else if id.contains("#dp") {
        // `<worker_id>#dp<rank>` is a rank's route key; an id of that form would collide with another worker's rank.
        "contains `#dp`"
    } else {
        return Ok(());
    };
    Err(RecordError::Value("worker_id", problem.to_owned()))
}

/// An endpoint nobody can connect to only costs cache knowledge, so it does not cost the worker.
fn events_endpoint(
    members: &mut Map<String, Value>,
    name: &'static str,
    notes: &mut Vec<String>,
) -> Result<Option<String>, RecordError> {
    let endpoint = match members.shift_remove(name) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.is_empty() => return Ok(None),
        Some(Value::String(text)) => text,
        Some(other) => return Err(RecordError::Type(name, kind(&other), "a string")),
    };
    match check_events_endpoint(&endpoint) {
        Ok(()) => Ok(Some(endpoint)),
        Err(error) => {
            notes.push(format!("`{name}` ignored: {error}"));
            Ok(None)
        }
    }
}

/// Names that cannot be used cost only themselves.
fn further_model_names(members: &mut Map<String, Value>, first: &str, notes: &mut Vec<String>) -> Vec<String> {
    const NAME: &str = "further_model_names";
    let names = match members.shift_remove(NAME) {
        None | Some(Value::Null) => return Vec::new(),
        Some(Value::Array(names)) => names,
        Some(other) => {
            notes.push(format!("`{NAME}` ignored: it is {}, expected an array", kind(&other)));
            return Vec::new();
        }
    };
    let mut kept: Vec<String> = Vec::new();
    for name in names.iter().filter_map(Value::as_str) {
        // A name twice would put the worker into that model's pool twice.
        let is_new = !name.is_empty() && name != first && kept.iter().all(|known| known != name);
        if is_new && kept.len() < limits::FURTHER_MODEL_NAMES_MAX {
            kept.push(name.to_owned());
        }
    }
    if kept.len() < names.len() {
        notes.push(format!("`{NAME}`: {} of {} names ignored", names.len() - kept.len(), names.len()));
    }
    kept
}

/// Arguments that cannot be used cost a template variant, not the worker.
fn template_arguments(members: &mut Map<String, Value>, notes: &mut Vec<String>) -> Option<Map<String, Value>> {
    const NAME: &str = "default_chat_template_kwargs";
    match members.shift_remove(NAME) {
        None | Some(Value::Null) => None,
        Some(Value::Object(arguments)) => Some(arguments),
        Some(other) => {
            notes.push(format!("`{NAME}` ignored: it is {}, expected an object", kind(&other)));
            None
        }
    }
}

fn block_size(members: &mut Map<String, Value>, notes: &mut Vec<String>) -> Result<Option<u32>, RecordError> {
    let Some(size) = integer(members, "kv_block_size")? else { return Ok(None) };
    match u32::try_from(size) {
        Ok(size) if size > 0 && size as usize <= limits::BLOCK_TOKENS_MAX => Ok(Some(size)),
        // Never guess a size: a wrong one would make every hash wrong, none makes the worker routed by load.
        _ => {
            notes.push(format!("`kv_block_size` ignored: {size} is not within 1..={}", limits::BLOCK_TOKENS_MAX));
            Ok(None)
        }
    }
}

fn dp_size(members: &mut Map<String, Value>, notes: &mut Vec<String>) -> Result<Option<u32>, RecordError> {
    let Some(size) = integer(members, "dp_size")? else { return Ok(None) };
    match u32::try_from(size) {
        Ok(0) | Err(_) if size <= 0 => {
            notes.push(format!("`dp_size` ignored: {size} is not positive"));
            Ok(None)
        }
        Ok(size) if size <= limits::DP_RANKS_MAX => Ok(Some(size)),
        // Dropping the size would route to rank 0 alone, without a sign; the record is at fault as a whole.
        _ => Err(RecordError::Value("dp_size", format!("{size} is above the cap of {}", limits::DP_RANKS_MAX))),
    }
}

fn dp_rank(members: &mut Map<String, Value>) -> Result<Option<u32>, RecordError> {
    let Some(rank) = integer(members, "dp_rank")? else { return Ok(None) };
    match u32::try_from(rank) {
        Ok(rank) if rank < limits::DP_RANKS_MAX => Ok(Some(rank)),
        _ => Err(RecordError::Value("dp_rank", format!("{rank} is not within 0..{}", limits::DP_RANKS_MAX))),
    }
}
