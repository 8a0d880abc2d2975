//! What the imitated engine makes of a chat body before the template: its own template arguments, and SGLang's rules for
//! an effort and for tools. Never encodes; see [`crate::prompt`].

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::events::EngineStyle;
use crate::prompt::TextModel;

/// Token ids of a chat body. `own`: arguments of the engine, for what the request does not set.
pub(super) fn chat_ids(
    text: &TextModel,
    style: EngineStyle,
    own: &Map<String, Value>,
    body: &Value,
) -> Result<Vec<u32>> {
    let is_sglang = style == EngineStyle::Sglang;
    if own.is_empty() && !is_sglang {
        return text.chat(body).map(|(_, ids)| ids);
    }
    let mut body = body.clone();
    let mut arguments = body["chat_template_kwargs"].as_object().cloned().unwrap_or_default();
    if is_sglang {
        if let Some(effort) = body["reasoning_effort"].as_str() {
            for name in ["thinking", "enable_thinking"] {
                arguments.entry(name).or_insert(Value::Bool(effort != "none"));
            }
            arguments.entry("reasoning_effort").or_insert(effort.into());
        }
        if let Some(tools) = body["tools"].as_array() {
            body["tools"] = tools.iter().map(sglang_tool).collect();
        }
    }
    for (name, value) in own {
        arguments.entry(name).or_insert(value.clone());
    }
    body["chat_template_kwargs"] = Value::Object(arguments);
    text.chat(&body).map(|(_, ids)| ids)
}

/// A tool as SGLang's typed model writes it again: members in its order, absent ones with their defaults.
fn sglang_tool(tool: &Value) -> Value {
    let function = &tool["function"];
    let strict = function.get("strict").cloned().unwrap_or(Value::Bool(false));
    let kind = tool.get("type").cloned().unwrap_or("function".into());
    json!({
        "type": kind,
        "function": {"description": function["description"], "name": function["name"],
            "parameters": function["parameters"], "strict": strict},
        "defer_loading": tool["defer_loading"],
    })
}
