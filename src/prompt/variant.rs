//! Template arguments that an engine was started with and adds to every request.
//!
//! Source of id and label: the render variants of AMD's Infera.

use anyhow::bail;
use xxhash_rust::xxh3::xxh3_64;

use super::tree::{Map, Tree};

/// The server-side template arguments of one worker, or of a fleet. Two workers with equal arguments render alike:
/// one rendering serves both.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Variant {
    pub(super) kwargs: Map<'static>,
    arguments: serde_json::Map<String, serde_json::Value>,
    id: u64,
    label: String,
}

impl Variant {
    /// The variant of a JSON object of arguments; the empty one is the default.
    pub fn of(kwargs: &serde_json::Map<String, serde_json::Value>) -> anyhow::Result<Self> {
        let text = serde_json::to_string(kwargs)?;
        let Ok(Tree::Map(map)) = Tree::parse(&text).map(Tree::into_owned) else {
            bail!("template arguments must be a JSON object of what a request may hold");
        };
        let mut members: Vec<(&String, String)> = kwargs.iter().map(|(key, value)| (key, value.to_string())).collect();
        members.sort();
        let mut bytes = Vec::new();
        for (key, value) in &members {
            bytes.extend_from_slice(key.as_bytes());
            bytes.push(0);
            bytes.extend_from_slice(value.as_bytes());
            bytes.push(0);
        }
        let (id, label) = match members.is_empty() {
            true => (0, "default".to_owned()),
            false => {
                let parts: Vec<String> = members.iter().map(|(key, value)| format!("{key}={value}")).collect();
                (xxh3_64(&bytes) | 1, parts.join(","))
            }
        };
        Ok(Self { kwargs: map, arguments: kwargs.clone(), id, label })
    }

    /// The arguments as JSON.
    pub fn arguments(&self) -> serde_json::Map<String, serde_json::Value> {
        self.arguments.clone()
    }

    /// 0 for the empty variant; equal for equal arguments, whatever their order.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// `default`, or `name=<json>` of each argument, for a metric.
    pub fn label(&self) -> &str {
        &self.label
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variant(text: &str) -> Variant {
        Variant::of(&serde_json::from_str(text).unwrap()).unwrap()
    }

    #[test]
    fn equal_arguments_make_equal_ids_in_any_order() {
        assert_eq!((variant("{}").id(), variant("{}").label().to_owned()), (0, "default".to_owned()));
        let (first, second) = (variant(r#"{"a":1,"b":false}"#), variant(r#"{"b":false,"a":1}"#));
        assert_eq!(first.id(), second.id());
        assert_eq!(first.label(), "a=1,b=false");
        assert_ne!(first.id(), variant(r#"{"a":1,"b":true}"#).id());
        assert_eq!(first.id() & 1, 1);
    }
}
