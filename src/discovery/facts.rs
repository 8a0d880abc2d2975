//! What engines say of themselves, taken out of their answers. Pure: bytes in, facts out.
//!
//! Sources of the forms: vLLM `/v1/models`, `/kv_event_sources`, `/metrics` (`vllm:cache_config_info`); SGLang
//! `/server_info` (formerly `/get_server_info`), which lists the server's arguments and, in newer releases, `kv_events`.

use serde_json::{Map, Value};

use crate::limits;
use crate::worker::{EngineKind, WorkerRecord, check_events_endpoint};

/// What asking has brought to light; each member fills the record's only where that is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Facts {
    pub model_name: Option<String>,
    /// What else the engine calls the same model.
    pub further_model_names: Vec<String>,
    pub engine: Option<&'static str>,
    pub kv_block_size: Option<u32>,
    pub dp_size: Option<u32>,
    pub kv_events_endpoint: Option<String>,
    pub kv_replay_endpoint: Option<String>,
    pub template_arguments: Option<Map<String, Value>>,
}

impl Facts {
    /// The record with its open members filled in; what the record says itself stays.
    pub fn complete(&self, record: &WorkerRecord) -> WorkerRecord {
        let mut complete = record.clone();
        if let (true, Some(model)) = (complete.model_name.is_empty(), &self.model_name) {
            complete.model_name.clone_from(model);
            complete.further_model_names.clone_from(&self.further_model_names);
        }
        if let (true, Some(engine)) = (complete.engine.is_empty(), self.engine) {
            complete.engine = engine.to_owned();
        }
        complete.kv_block_size = complete.kv_block_size.or(self.kv_block_size);
        if complete.dp_rank.is_none() {
            complete.dp_size = complete.dp_size.or(self.dp_size);
        }
        if complete.kv_events_endpoint.is_none() {
            complete.kv_events_endpoint.clone_from(&self.kv_events_endpoint);
        }
        if complete.kv_replay_endpoint.is_none() {
            complete.kv_replay_endpoint.clone_from(&self.kv_replay_endpoint);
        }
        if complete.default_chat_template_kwargs.is_none() {
            complete.default_chat_template_kwargs.clone_from(&self.template_arguments);
        }
        complete
    }

    /// From `/v1/models`: all names that are no adapter's, the first one first, and the engine by its `owned_by`. An adapter
    /// has cache blocks of its own and is not routed by its name.
    pub fn read_models(&mut self, body: &[u8]) -> Result<(), String> {
        let value: Value = serde_json::from_slice(body).map_err(|error| format!("not JSON ({error})"))?;
        let Some(models) = value.get("data").and_then(Value::as_array) else {
            return Err("no `data` array".to_owned());
        };
        let text = |model: &Value, name: &str| model.get(name).and_then(Value::as_str).unwrap_or("").to_owned();
        // LoRA adapters name their base model as parent.
        let is_base = |model: &&Value| model.get("parent").is_none_or(Value::is_null);
        let named = || models.iter().filter(|model| !text(model, "id").is_empty());
        let Some(model) = named().find(is_base).or_else(|| named().next()) else {
            return Err("no model in it yet".to_owned());
        };
        self.model_name = Some(text(model, "id"));
        self.further_model_names.clear();
        for name in named().filter(is_base).map(|model| text(model, "id")) {
            let is_known = self.model_name.as_ref() == Some(&name) || self.further_model_names.contains(&name);
            if !is_known && self.further_model_names.len() < limits::FURTHER_MODEL_NAMES_MAX {
                self.further_model_names.push(name);
            }
        }
        self.engine = match EngineKind::from_name(&text(model, "owned_by")) {
            EngineKind::Vllm => Some("vllm"),
            EngineKind::Sglang => Some("sglang"),
            EngineKind::Atom => Some("atom"),
            EngineKind::Unknown => self.engine,
        };
        Ok(())
    }

    /// From vLLM's `/kv_event_sources`: `{"0":{endpoint,replay_endpoint,…},"1":…}`, one member per rank. `host` replaces
    /// the wildcard that a publisher binds.
    pub fn read_event_sources(&mut self, body: &[u8], host: &str) -> Result<(), String> {
        let value: Value = serde_json::from_slice(body).map_err(|error| format!("not JSON ({error})"))?;
        let Some(sources) = value.as_object() else { return Err("not an object".to_owned()) };
        let ranks = sources.keys().filter_map(|key| key.parse::<u32>().ok()).max();
        let Some(first) = sources.get("0").and_then(Value::as_object) else { return Ok(()) };
        self.engine = self.engine.or(Some("vllm"));
        self.kv_events_endpoint = endpoint(first, "endpoint", host);
        self.kv_replay_endpoint = endpoint(first, "replay_endpoint", host);
        self.kv_block_size = block_size(first.get("block_size")).or(self.kv_block_size);
        self.dp_size = ranks.and_then(|last| dp_size(u64::from(last) + 1)).or(self.dp_size);
        Ok(())
    }

    /// From Prometheus text: the `block_size` label of `vllm:cache_config_info`.
    pub fn read_metrics(&mut self, body: &[u8]) {
        let text = String::from_utf8_lossy(body);
        let Some(labels) = text
            .lines()
            .filter_map(|line| line.strip_prefix("vllm:cache_config_info"))
            .find_map(|rest| rest.strip_prefix('{').and_then(|rest| rest.rsplit_once('}')).map(|(labels, _)| labels))
        else {
            return;
        };
        self.engine = self.engine.or(Some("vllm"));
        let size = labels
            .split(',')
            .filter_map(|label| label.trim().split_once('='))
            .find(|(name, _)| *name == "block_size")
            .and_then(|(_, value)| value.trim_matches('"').parse::<u64>().ok());
        self.kv_block_size = size.and_then(|size| block_size(Some(&Value::from(size)))).or(self.kv_block_size);
    }

    /// From SGLang's `/server_info` (or `/get_server_info`). Another server's answer changes nothing.
    pub fn read_server_info(&mut self, body: &[u8], host: &str) -> Result<(), String> {
        let value: Value = serde_json::from_slice(body).map_err(|error| format!("not JSON ({error})"))?;
        let Some(root) = value.as_object() else { return Err("not an object".to_owned()) };
        // The arguments stand at the top, or under `server_args`.
        let info = root.get("server_args").and_then(Value::as_object).unwrap_or(root);
        self.template_arguments = template_arguments(root, info).or(self.template_arguments.take());
        let events = ["kv_events"].iter().find_map(|name| root.get(*name).or_else(|| info.get(*name)));
        let events = events.and_then(Value::as_object);
        if !info.contains_key("page_size") && events.is_none() {
            return Ok(());
        }
        self.engine = self.engine.or(Some("sglang"));
        let positive = |value: Option<&Value>| value.and_then(Value::as_u64);
        self.kv_block_size = block_size(events.and_then(|events| events.get("block_size")))
            .or_else(|| block_size(info.get("page_size")))
            .or(self.kv_block_size);
        self.dp_size = positive(events.and_then(|events| events.get("dp_size")))
            .or_else(|| positive(info.get("dp_size")))
            .and_then(dp_size)
            .or(self.dp_size);
        if let Some(events) = events {
            let event_host = events.get("endpoint_host").and_then(Value::as_str).unwrap_or("*");
            let from_port = |name: &str| {
                let port = u16::try_from(events.get(name)?.as_u64()?).ok()?;
                connectable(&format!("tcp://{event_host}:{port}"), host)
            };
            self.kv_events_endpoint = from_port("endpoint_port_base").or_else(|| endpoint(events, "endpoint", host));
            self.kv_replay_endpoint =
                from_port("replay_endpoint_port_base").or_else(|| endpoint(events, "replay_endpoint", host));
        } else if let Some(config) = info.get("kv_events_config").and_then(Value::as_str)
            && let Ok(Value::Object(config)) = serde_json::from_str(config)
        {
            self.kv_events_endpoint = endpoint(&config, "endpoint", host);
            self.kv_replay_endpoint = endpoint(&config, "replay_endpoint", host);
        }
        Ok(())
    }
}

/// Present but empty counts as said: the engine adds nothing. Launchers hand the option on as text.
fn template_arguments(root: &Map<String, Value>, info: &Map<String, Value>) -> Option<Map<String, Value>> {
    const NAME: &str = "default_chat_template_kwargs";
    match root.get(NAME).or_else(|| info.get(NAME))? {
        Value::Null => Some(Map::new()),
        Value::Object(arguments) => Some(arguments.clone()),
        Value::String(text) if text.trim().is_empty() => Some(Map::new()),
        Value::String(text) => serde_json::from_str(text).ok(),
        _ => None,
    }
}

fn block_size(value: Option<&Value>) -> Option<u32> {
    let size = value?.as_u64()?;
    (1..=limits::BLOCK_TOKENS_MAX as u64).contains(&size).then_some(size as u32)
}

/// One rank needs no number.
fn dp_size(size: u64) -> Option<u32> {
    (2..=u64::from(limits::DP_RANKS_MAX)).contains(&size).then_some(size as u32)
}

fn endpoint(members: &Map<String, Value>, name: &str, host: &str) -> Option<String> {
    connectable(members.get(name)?.as_str()?, host)
}

/// What an engine binds, made into what the router connects to: a wildcard becomes the worker's host. Addresses
/// of other kinds (`ipc://`) name things on the engine's machine.
fn connectable(endpoint: &str, host: &str) -> Option<String> {
    let (bound_host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let host = match (bound_host, host.contains(':')) {
        ("*" | "0.0.0.0" | "[::]" | "::", true) => format!("[{host}]"),
        ("*" | "0.0.0.0" | "[::]" | "::", false) => host.to_owned(),
        (bound_host, _) => bound_host.to_owned(),
    };
    let endpoint = format!("tcp://{host}:{port}");
    check_events_endpoint(&endpoint).is_ok().then_some(endpoint)
}

#[cfg(test)]
mod tests;
