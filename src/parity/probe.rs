//! The comparison before traffic: fixed conversations that a worker is asked to tokenize, and the verdict over its
//! answers. Pure: the conversations go out and the answers come in elsewhere.
//!
//! Source of the conversations and of the verdict's rules: the render probe of AMD's Infera. Two rules are ours: a
//! conversation that the engine itself refuses says nothing, and one that it alone can render is a divergence.

use serde_json::{Map, Value, json};

use crate::fleet::Parity;
use crate::prompt::{Endpoint, EngineRules, Prompter, Variant};

/// One fixed conversation.
#[derive(Clone, Debug)]
pub struct Probe {
    pub name: &'static str,
    /// A chat body; also what the worker's `/tokenize` is sent.
    pub body: Value,
}

/// What the worker said to one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Tokens(Vec<u32>),
    /// The engine does not take this conversation.
    Refused,
    /// No answer, or one that cannot be read.
    Silent,
}

/// The conversations for an engine. `arguments`: the template arguments that the engine adds to every chat, as far as
/// known: vLLM's `/tokenize` is told them, SGLang's adds its own.
pub fn probes(rules: EngineRules, model: &str, arguments: Option<&Map<String, Value>>) -> Vec<Probe> {
    let tools = json!([{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]);
    let user = |text: &str| json!({"role": "user", "content": text});
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function",
        "function": {"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}}]});
    let result = json!({"role": "tool", "tool_call_id": "call_1", "content": "{\"temperature\": 21}"});
    let mut bodies = vec![
        ("plain", json!({"messages": [user("What is 2+2?")]})),
        ("tools", json!({"messages": [user("Weather in Paris?")], "tools": tools})),
        ("tool_call", json!({"messages": [user("Weather in Paris?"), call, result], "tools": tools})),
    ];
    if rules == EngineRules::Sglang {
        bodies.push(("effort", json!({"messages": [user("hi")], "reasoning_effort": "low"})));
    }
    let with_arguments = arguments.filter(|arguments| rules == EngineRules::Vllm && !arguments.is_empty());
    let complete = |(name, mut body): (&'static str, Value)| {
        if !model.is_empty() {
            body["model"] = model.into();
        }
        body["add_special_tokens"] = false.into();
        if let Some(arguments) = with_arguments {
            body["chat_template_kwargs"] = Value::Object(arguments.clone());
        }
        Probe { name, body }
    };
    bodies.into_iter().map(complete).collect()
}

/// This router's own tokens of each probe; `None` where it has none.
pub fn own_tokens(
    prompter: &Prompter,
    rules: EngineRules,
    variant: Option<&Variant>,
    probes: &[Probe],
) -> Vec<Option<Vec<u32>>> {
    let tokens = |probe: &Probe| {
        let body = probe.body.to_string();
        prompter.tokens_of_variant(Endpoint::Chat, rules, variant, body.as_bytes()).ok().map(|prompt| prompt.ids)
    };
    probes.iter().map(tokens).collect()
}

/// The verdict, and what it rests on; for the log.
pub fn judge(probes: &[Probe], own: &[Option<Vec<u32>>], answers: &[Answer]) -> (Parity, String) {
    let (mut confirmed, mut silent, mut declined) = (0, 0, 0);
    for ((probe, own), answer) in probes.iter().zip(own).zip(answers) {
        match (own, answer) {
            (_, Answer::Refused) => {}
            (_, Answer::Silent) => silent += 1,
            (None, Answer::Tokens(_)) => declined += 1,
            (Some(own), Answer::Tokens(theirs)) if own == theirs => confirmed += 1,
            (Some(own), Answer::Tokens(theirs)) => {
                let at = own.iter().zip(theirs).take_while(|(own, theirs)| own == theirs).count();
                let detail = format!("`{}` diverges at token {at} of {}", probe.name, theirs.len());
                return (Parity::Diverged, detail);
            }
        }
    }
    match (confirmed, silent, declined) {
        (1.., _, 1..) => (Parity::Diverged, format!("{declined} conversations cannot be rendered here")),
        (1.., 0, 0) => (Parity::Confirmed, format!("{confirmed} conversations agree")),
        (0, 0, 1..) => (Parity::Unknown, "no conversation can be rendered here".to_owned()),
        _ => (Parity::Unknown, format!("{silent} conversations were not answered")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        let check = |own: &[Option<&[u32]>], answers: &[Answer], expected: Parity, detail: &str| {
            let probes = probes(EngineRules::Sglang, "m", None);
            let own: Vec<_> = own.iter().map(|ids| ids.map(<[u32]>::to_vec)).collect();
            let (parity, said) = judge(&probes, &own, answers);
            assert_eq!(parity, expected, "{said}");
            assert!(said.contains(detail), "{said}");
        };
        let ids: &[u32] = &[1, 2, 3];
        let tokens = |ids: &[u32]| Answer::Tokens(ids.to_vec());
        let (same, refused, silent) = (tokens(ids), Answer::Refused, Answer::Silent);
        check(&[Some(ids), Some(ids)], &[same.clone(), same.clone()], Parity::Confirmed, "2 conversations");
        check(&[Some(ids), Some(ids)], &[same.clone(), refused.clone()], Parity::Confirmed, "1 conversations");
        check(&[Some(ids), Some(ids)], &[same.clone(), silent.clone()], Parity::Unknown, "1 conversations");
        let shifted = tokens(&[1, 9, 2, 3]);
        check(
            &[Some(ids), Some(ids)],
            &[silent.clone(), shifted],
            Parity::Diverged,
            "`tools` diverges at token 1 of 4",
        );
        check(&[Some(ids)], &[tokens(&[1, 2])], Parity::Diverged, "at token 2 of 2");
        check(&[Some(ids), None], &[same.clone(), same.clone()], Parity::Diverged, "cannot be rendered");
        check(&[None, None], &[same.clone(), same.clone()], Parity::Unknown, "no conversation");
        check(&[None, None], &[refused.clone(), silent], Parity::Unknown, "not answered");
        check(&[Some(ids)], &[refused], Parity::Unknown, "0 conversations");
    }

    #[test]
    fn what_an_engine_is_told() {
        let arguments = json!({"enable_thinking": false});
        let vllm = probes(EngineRules::Vllm, "m", arguments.as_object());
        assert!(vllm.iter().all(|probe| probe.body["chat_template_kwargs"] == arguments && probe.body["model"] == "m"));
        assert!(vllm.iter().all(|probe| probe.name != "effort"), "its /tokenize does not know that member");
        let sglang = probes(EngineRules::Sglang, "", arguments.as_object());
        assert!(sglang.iter().all(|probe| probe.body.get("chat_template_kwargs").is_none()));
        assert!(sglang.iter().all(|probe| probe.body.get("model").is_none()));
        assert_eq!(sglang.iter().filter(|probe| probe.name == "effort").count(), 1);
    }
}
