//! Chats that engines render in code, Responses bodies and tiktoken models, against recorded answers of the engines'
//! own functions (`tests/differential/record_native.py`, `record_tiktoken.py`).
//!
//! Needs the tokenizers of `tests/setup/fetch_tokenizers.sh`. Without them the tests say which did not run; with
//! `INFERA_REQUIRE_TOKENIZERS=1` that is a failure.

#![allow(clippy::unwrap_used)]

#[path = "support/tokenizers.rs"]
mod tokenizers;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use infera_router::prompt::{ChatEncoding, EncoderChoice, Endpoint, EngineRules, NoBlocks, Prompter, PrompterOptions};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// 2026-01-15 12:00 UTC, the clock of the recordings.
const RECORDED_AT_S: u64 = 1_768_478_400;

fn fetched(name: &str, file: &str) -> Option<PathBuf> {
    tokenizers::with_file(name, file).map(|directory| directory.join(file))
}

fn fixture(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/native").join(name)).unwrap()
}

fn lines(name: &str) -> Vec<Value> {
    fixture(name).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A model directory around a fetched tokenizer file.
fn model(tokenizer: &Path, files: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let name = tokenizer.file_name().unwrap();
    std::os::unix::fs::symlink(tokenizer, directory.path().join(name)).unwrap();
    for (name, text) in files {
        let path = directory.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    directory
}

fn options() -> PrompterOptions {
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(RECORDED_AT_S);
    PrompterOptions { now: Some(now), ..PrompterOptions::default() }
}

fn load(directory: &tempfile::TempDir) -> Prompter {
    Prompter::load(directory.path(), options()).unwrap()
}

fn rules(line: &Value) -> EngineRules {
    EngineRules::of_engine(line["engine"].as_str().unwrap())
}

/// The line's body in its own spelling: what `serde_json` keeps of numbers is not enough.
fn bodies(name: &str) -> Vec<String> {
    #[derive(serde::Deserialize)]
    struct Line<'a> {
        #[serde(borrow)]
        body: &'a serde_json::value::RawValue,
    }
    let body = |line: &str| serde_json::from_str::<Line>(line).unwrap().body.get().to_owned();
    fixture(name).lines().map(body).collect()
}

/// Fails with up to five of the lines that differ.
fn all_equal(name: &str, checked: usize, wrong: &[String]) {
    let shown = wrong.iter().take(5).cloned().collect::<Vec<_>>().join("\n\n");
    assert!(wrong.is_empty(), "{name}: {} of {checked} differ\n{shown}", wrong.len());
}

fn check_texts(name: &str, prompter: impl Fn(&Value) -> usize, prompters: &[Prompter]) -> usize {
    let (mut checked, mut wrong) = (0, Vec::new());
    for (line, body) in lines(name).iter().zip(bodies(name)) {
        let found = prompters[prompter(line)].tokens(Endpoint::Chat, rules(line), body.as_bytes());
        let why = match (found, line.get("error")) {
            (Err(_), Some(_)) => None,
            (Err(refusal), None) => Some(format!("refused: {refusal}")),
            (Ok(prompt), Some(error)) => Some(format!("{:?} instead of {error}", prompt.text)),
            (Ok(prompt), None) => {
                checked += 1;
                let text = prompt.text.unwrap();
                if line["text"] != text {
                    Some(format!("text\n  ours   {text:?}\n  theirs {:?}", line["text"].as_str().unwrap()))
                } else if line.get("ids").is_some_and(|ids| *ids != json!(prompt.ids)) {
                    Some(format!("ids\n  ours   {:?}\n  theirs {}", prompt.ids, line["ids"]))
                } else {
                    None
                }
            }
        };
        wrong.extend(why.map(|why| format!("{}: {body}\n{why}", line["id"])));
    }
    all_equal(name, checked, &wrong);
    checked
}

#[test]
fn deepseek_v4_chats_of_both_engines() {
    let Some(tokenizer) = fetched("deepseek_v4", "tokenizer.json") else { return };
    let config = r#"{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}"#;
    let encoder = "REASONING_EFFORT_PROMPTS = {}\nDEFAULT_REASONING_EFFORT = 'low'\n";
    let preview = load(&model(&tokenizer, &[("config.json", config)]));
    let official = load(&model(&tokenizer, &[("config.json", config), ("encoding/encoding_dsv4.py", encoder)]));
    assert_eq!(preview.chat_renderer(EngineRules::Vllm), "deepseek_v4");
    let place = |line: &Value| usize::from(line["model"] == "deepseek_v4_official");
    assert!(check_texts("deepseek_v4.jsonl", place, &[preview, official]) > 120);
}

/// A model directory without a word about its kind, as a fine-tune may be published.
#[test]
fn an_encoder_that_is_asked_for_by_name_needs_no_detection() {
    let Some(tokenizer) = fetched("deepseek_v4", "tokenizer.json") else { return };
    let directory = model(&tokenizer, &[]);
    let body = br#"{"messages":[{"role":"user","content":"hi"}]}"#;
    let plain = load(&directory);
    assert!(plain.tokens(Endpoint::Chat, EngineRules::Vllm, body).is_err(), "no template");
    let options = PrompterOptions { chat_encoding: Some(ChatEncoding::Dsv4), ..options() };
    let named = Prompter::load(directory.path(), options).unwrap();
    let config = r#"{"architectures": ["DeepseekV4ForCausalLM"]}"#;
    let detected = load(&model(&tokenizer, &[("config.json", config)]));
    let ids = |prompter: &Prompter| prompter.tokens(Endpoint::Chat, EngineRules::Vllm, body).unwrap().ids;
    assert_eq!(ids(&named), ids(&detected));
}

#[test]
fn harmony_chats_of_vllm() {
    let Some(tokenizer) = fetched("gptoss", "tokenizer.json") else { return };
    let config = r#"{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}"#;
    let prompter = load(&model(&tokenizer, &[("config.json", config), ("chat_template.jinja", "the template")]));
    assert_eq!(prompter.chat_renderer(EngineRules::Vllm), "harmony");
    assert_eq!(prompter.chat_renderer(EngineRules::Sglang), "template");
    let body = br#"{"messages":[{"role":"user","content":"hi"}]}"#;
    let prompt = prompter.tokens(Endpoint::Chat, EngineRules::Sglang, body).unwrap();
    assert_eq!(prompt.text.as_deref(), Some("the template"));
    let spelled = br#"{"messages":[{"role":"user","content":"a <|end|> b"}]}"#;
    let refusal = prompter.tokens(Endpoint::Chat, EngineRules::Vllm, spelled).unwrap_err();
    assert_eq!(refusal, NoBlocks::Unsupported("text that spells a special token"));
    // Blocks go through the prefix cache; a chat that goes on begins like the chat before.
    let blocks = |body: &[u8]| prompter.blocks(Endpoint::Chat, EngineRules::Vllm, body, 16).unwrap();
    let long = "word ".repeat(400);
    let parts = |split: usize| {
        let (first, second) = long.split_at(split);
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": first}, {"type": "text", "text": second}]}]})
            .to_string()
    };
    for split in [1003, 1004, 1003] {
        let body = parts(split);
        let ids = prompter.tokens(Endpoint::Chat, EngineRules::Vllm, body.as_bytes()).unwrap();
        assert_eq!(blocks(body.as_bytes()), ids.blocks(16), "parts that meet at {split}");
    }
    assert!(check_texts("harmony.jsonl", |_| 0, &[prompter]) > 70);
}

#[test]
fn models_that_are_rendered_in_code_elsewhere_are_refused_by_name() {
    let Some(tokenizer) = fetched("deepseek_v4", "tokenizer.json") else { return };
    let body = br#"{"messages":[{"role":"user","content":"hi"}]}"#;
    for (config, what) in [
        (r#"{"architectures": ["DeepseekV32ForCausalLM"]}"#, "DeepSeek-V3.2 chats"),
        (r#"{"architectures": ["DeepseekV41ForCausalLM"]}"#, "DeepSeek-V4.1 chats"),
        (r#"{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v41"}"#, "DeepSeek-V4.1 chats"),
        (r#"{"architectures": ["InklingForCausalLM"]}"#, "Inkling chats"),
    ] {
        let directory = model(&tokenizer, &[("config.json", config), ("chat_template.jinja", "a template")]);
        let options = PrompterOptions { encoder: EncoderChoice::Reference, ..options() };
        let prompter = Prompter::load(directory.path(), options).unwrap();
        let refusal = prompter.tokens(Endpoint::Chat, EngineRules::Vllm, body).unwrap_err();
        assert_eq!(refusal, NoBlocks::Unsupported(what), "{config}");
        assert!(prompter.tokens(Endpoint::Completions, EngineRules::Vllm, br#"{"prompt":"hi"}"#).is_ok());
    }
}

/// Shows everything that a template is given.
const SHOW_ALL: &str = "{# 'developer' #}{% for message in messages %}{% for part in message.content %}{% endfor %}{% endfor %}\
{{ messages | tojson }}|{{ tools | tojson }}|{{ add_generation_prompt }}|{{ reasoning_effort | default('-') }}|{{ enable_thinking | default('-') }}";

#[test]
fn responses_bodies_become_the_chats_that_the_engines_make_of_them() {
    let Some(tokenizer) = fetched("deepseek_v4", "tokenizer.json") else { return };
    let prompter = load(&model(&tokenizer, &[("chat_template.jinja", SHOW_ALL)]));
    let (mut wrong, mut checked) = (Vec::new(), 0);
    for (line, body) in lines("responses.jsonl").iter().zip(bodies("responses.jsonl")) {
        let is_open = line["continues"] == true;
        let chat =
            json!({"messages": line["messages"], "add_generation_prompt": !is_open, "continue_final_message": is_open});
        let expected = prompter.tokens(Endpoint::Chat, rules(line), chat.to_string().as_bytes());
        let found = prompter.tokens(Endpoint::Responses, rules(line), body.as_bytes());
        checked += usize::from(expected.is_ok());
        if found != expected {
            wrong.push(format!("{}: {body}\n  ours   {found:?}\n  theirs {expected:?}", line["id"]));
        }
    }
    all_equal("responses", checked, &wrong);
    assert!(checked > 100, "only {checked} could be rendered");
}

/// The two sides of a table: a Responses body, and the chat body that an engine makes of it.
fn check_responses(prompter: &Prompter, engine: EngineRules, responses: Value, chat: Value) {
    let found = prompter.tokens(Endpoint::Responses, engine, responses.to_string().as_bytes());
    let expected = prompter.tokens(Endpoint::Chat, engine, chat.to_string().as_bytes());
    assert!(expected.is_ok(), "{chat}: {expected:?}");
    assert_eq!(found, expected, "{responses}");
}

#[test]
fn tools_and_reasoning_of_responses_bodies() {
    let Some(tokenizer) = fetched("deepseek_v4", "tokenizer.json") else { return };
    let prompter = load(&model(&tokenizer, &[("chat_template.jinja", SHOW_ALL)]));
    let user = json!([{"role": "user", "content": "hi"}]);
    let flat =
        json!({"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": null});
    let nested =
        json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}});
    let inner = json!({"type": "namespace", "name": "ns", "description": "x", "tools": [flat]});
    let mut spaced = nested.clone();
    spaced["function"]["name"] = "ns__f".into();
    let vllm = EngineRules::Vllm;
    let sglang = EngineRules::Sglang;
    let mut strict = flat.clone();
    strict["strict"] = true.into();
    let mut nested_strict = nested.clone();
    nested_strict["function"]["strict"] = true.into();
    check_responses(
        &prompter,
        vllm,
        json!({"input": "hi", "tools": [flat, {"type": "web_search"}]}),
        json!({"messages": user, "tools": [nested]}),
    );
    check_responses(
        &prompter,
        vllm,
        json!({"input": "hi", "tools": [inner]}),
        json!({"messages": user, "tools": [spaced]}),
    );
    check_responses(
        &prompter,
        vllm,
        json!({"input": "hi", "reasoning": {"effort": "low"}}),
        json!({"messages": user, "reasoning_effort": "low"}),
    );
    check_responses(&prompter, vllm, json!({"input": "hi", "reasoning": {}}), json!({"messages": user}));
    check_responses(
        &prompter,
        sglang,
        json!({"input": "hi", "tools": [strict]}),
        json!({"messages": user, "tools": [nested_strict]}),
    );
    check_responses(
        &prompter,
        sglang,
        json!({"input": "hi", "tools": [strict], "tool_choice": "none"}),
        json!({"messages": user}),
    );
    let named = json!({"input": "hi", "tools": [strict], "tool_choice": {"type": "function", "name": "other"}});
    check_responses(&prompter, sglang, named, json!({"messages": user}));
    check_responses(
        &prompter,
        sglang,
        json!({"input": "hi", "reasoning": {}}),
        json!({"messages": user, "reasoning_effort": "medium"}),
    );
    check_responses(
        &prompter,
        sglang,
        json!({"input": "hi", "reasoning": {"effort": null}}),
        json!({"messages": user}),
    );
    let kwargs = json!({"enable_thinking": true});
    check_responses(
        &prompter,
        sglang,
        json!({"input": "hi", "reasoning": {"effort": "none"}, "chat_template_kwargs": kwargs}),
        json!({"messages": user, "reasoning_effort": "none", "chat_template_kwargs": kwargs}),
    );
    for (body, what) in [
        (json!({"input": "hi", "previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"input": "hi", "conversation": {"id": "c"}}), "a stored conversation or prompt"),
        (json!({"input": "hi", "prompt": {"id": "p"}}), "a stored conversation or prompt"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "an input item of this type"),
    ] {
        for engine in [vllm, sglang] {
            let refusal = prompter.tokens(Endpoint::Responses, engine, body.to_string().as_bytes()).unwrap_err();
            assert_eq!(refusal, NoBlocks::Unsupported(what), "{body}");
        }
    }
    let none = prompter.tokens(Endpoint::Responses, vllm, br#"{"instructions":"x"}"#).unwrap_err();
    assert_eq!(none, NoBlocks::NoPrompt);
}

#[derive(serde::Deserialize)]
struct MessagesCase<'a> {
    id: &'a str,
    engine: &'a str,
    /// Made for a template that takes system messages anywhere.
    late_system: bool,
    #[serde(borrow)]
    body: &'a RawValue,
    #[serde(borrow)]
    chat: Option<&'a RawValue>,
}

/// Messages bodies and the chats that the engines' own code made of them (`tests/fixtures/messages`), as prompts of a model
/// whose template takes system messages anywhere and has marks for thinking.
#[test]
fn messages_are_the_prompts_of_the_chats_that_the_engines_make_of_them() {
    let Some(directory) = tokenizers::fetched("qwen3") else { return };
    let prompter = Prompter::load(&directory, options()).unwrap();
    for engine in [EngineRules::Vllm, EngineRules::Sglang] {
        let traits = prompter.template_traits(engine);
        assert!(traits.takes_late_system && traits.has_think_tags, "{engine:?}");
    }
    let mut checked = 0;
    for line in include_str!("fixtures/messages/chats.jsonl").lines() {
        let case: MessagesCase<'_> = serde_json::from_str(line).unwrap();
        let Some(chat) = case.chat else { continue };
        if !case.late_system && case.id.starts_with("late_system") {
            continue;
        }
        let engine = EngineRules::of_engine(case.engine);
        let tokens = |endpoint, body: &RawValue| prompter.tokens(endpoint, engine, body.get().as_bytes());
        let (found, expected) = (tokens(Endpoint::Messages, case.body), tokens(Endpoint::Chat, chat));
        assert_eq!(found, expected, "{} {engine:?}", case.id);
        checked += usize::from(expected.is_ok());
    }
    assert!(checked > 50, "{checked}");
}

/// A Kimi-K3 model around other ranks: the text is the model's, the ids are right for these ranks.
fn kimi_k3() -> Option<Prompter> {
    let ranks = fetched("tiktoken", "tiktoken.model")?;
    let token = |content: &str| json!({"content": content, "special": true});
    let config = json!({
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]},
        "added_tokens_decoder": {"151650": token("<|open|>"), "151651": token("<|close|>"), "151652": token("<|sep|>"), "151653": token("<|end_of_msg|>")},
    });
    let architecture = r#"{"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}"#;
    Some(load(&model(&ranks, &[("tokenizer_config.json", &config.to_string()), ("config.json", architecture)])))
}

/// Rows: engine, body, text. The texts of the first rows are those of vLLM's own tests of its Kimi-K3 tokenizer; the
/// rest follows `encoding_k3.py` of the model.
#[test]
fn kimi_k3_chats_of_both_engines() {
    let Some(prompter) = kimi_k3() else { return };
    let (vllm, sglang) = (EngineRules::Vllm, EngineRules::Sglang);
    assert_eq!(prompter.chat_renderer(vllm), "kimi_k3");
    let text = |engine, body: &Value| {
        prompter.tokens(Endpoint::Chat, engine, body.to_string().as_bytes()).map(|prompt| prompt.text.unwrap())
    };
    let turn = |role: &str, inside: &str| {
        format!("<|open|>message role=\"{role}\"<|sep|>{inside}<|close|>message<|sep|><|end_of_msg|>")
    };
    let effort = |effort: &str| {
        format!(
            "<|open|>message role=\"system\" type=\"thinking-effort\"<|sep|>`thinking_effort` guides on how much to think in your \
             thinking channel (not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n\
             Now the system is invoked with `thinking_effort={effort}`.<|close|>message<|sep|><|end_of_msg|>"
        )
    };
    let think = "<|open|>message role=\"assistant\"<|sep|><|open|>think<|sep|>";
    let respond = "<|open|>message role=\"assistant\"<|sep|><|open|>response<|sep|>";
    let hello = json!([{"role": "user", "content": "hello"}]);
    let history = json!([
        {"role": "user", "content": "first question"},
        {"role": "assistant", "reasoning": "first reasoning", "reasoning_content": "first reasoning", "content": "first answer"},
        {"role": "user", "content": "follow-up question"}
    ]);
    let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "look\"up", "arguments": arguments}});
    let calls = json!([
        {"role": "assistant", "content": "", "tool_calls": [call("a", r#"{"s": "x & y", "n": 1.0, "l": [1, null], "b": true}"#), call("b", "{}")]},
        {"role": "tool", "tool_call_id": "b", "content": "second"},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
        {"role": "user", "content": ""}
    ]);
    let lost = json!([
        {"role": "assistant", "content": "", "tool_calls": [call("a", "{}"), call("b", "{}")]},
        {"role": "tool", "tool_call_id": "b", "content": "1"},
        {"role": "tool", "tool_call_id": "unknown", "content": "2"}
    ]);
    let argument = |key: &str, kind: &str, value: &str| {
        format!("<|open|>argument key=\"{key}\" type=\"{kind}\"<|sep|>{value}<|close|>argument<|sep|>")
    };
    let called = |index: usize, inside: &str| {
        format!("<|open|>call tool=\"look&quot;up\" index=\"{index}\"<|sep|>{inside}<|close|>call<|sep|>")
    };
    let arguments = [
        argument("s", "string", "x & y"),
        argument("n", "number", "1.0"),
        argument("l", "array", "[1, null]"),
        argument("b", "boolean", "true"),
    ]
    .concat();
    let result = |index: usize, text: &str| {
        format!(
            "<|open|>message role=\"tool\" tool=\"look&quot;up\" index=\"{index}\"<|sep|>{text}<|close|>message<|sep|><|end_of_msg|>"
        )
    };
    let with_calls = |inside: &str| {
        turn(
            "assistant",
            &format!(
                "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>{inside}<|close|>tools<|sep|>"
            ),
        )
    };
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}}]);
    let declared = |function: &str| {
        format!(
            "<|open|>message role=\"system\" type=\"tool-declare\"<|sep|># Tools\nHere are the available tools, described in JSONSchema.\n\n\
             ```json\n[{{\"function\":{function},\"type\":\"function\"}}]\n```<|close|>message<|sep|><|end_of_msg|>"
        )
    };
    let parameters = r#""parameters":{"properties":{"a":{},"z":{}},"type":"object"}"#;
    let system = |kind: &str, body: &str| {
        format!("<|open|>message role=\"system\" type=\"{kind}\"<|sep|>{body}<|close|>message<|sep|><|end_of_msg|>")
    };
    let chosen = system(
        "tool-choice",
        "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    );
    let schema = system(
        "response-format",
        "The system is invoked with `response_format=json_schema`.\nYour response must be raw JSON data without markdown code \
         blocks (```json) or any additional formatting.\nThe JSON data must match the following schema:\n```json\n{\"a\":1,\"b\":2}\n```",
    );
    let quiet = json!({"thinking": false});
    for engine in [vllm, sglang] {
        let rows = [
            (json!({"messages": hello, "chat_template_kwargs": quiet}), turn("user", "hello") + respond),
            (json!({"messages": hello, "reasoning_effort": "none"}), turn("user", "hello") + respond),
            (json!({"messages": hello, "reasoning_effort": "low"}), effort("low") + &turn("user", "hello") + think),
            (
                json!({"messages": hello, "chat_template_kwargs": {"thinking_effort": "high"}}),
                effort("high") + &turn("user", "hello") + think,
            ),
            (
                json!({"messages": history}),
                effort("max")
                    + &turn("user", "first question")
                    + &turn(
                        "assistant",
                        "<|open|>think<|sep|>first reasoning<|close|>think<|sep|><|open|>response<|sep|>first answer<|close|>response<|sep|>",
                    )
                    + &turn("user", "follow-up question")
                    + think,
            ),
            (
                json!({"messages": calls, "chat_template_kwargs": quiet}),
                with_calls(&(called(1, &arguments) + &called(2, "")))
                    + &result(1, "first")
                    + &result(2, "second")
                    + &turn("user", "")
                    + respond,
            ),
            (
                json!({"messages": lost, "chat_template_kwargs": quiet}),
                with_calls(&(called(1, "") + &called(2, ""))) + &result(1, "1") + &result(2, "2") + respond,
            ),
            (
                json!({"messages": hello, "chat_template_kwargs": quiet, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"b": 2, "a": 1}}}}),
                turn("user", "hello") + &schema + respond,
            ),
        ];
        for (body, expected) in rows {
            assert_eq!(text(engine, &body), Ok(expected), "{engine:?} {body}");
        }
    }
    let body = json!({"messages": hello, "chat_template_kwargs": quiet, "tools": tools, "tool_choice": "required"});
    let expected = |function: &str| declared(function) + &turn("user", "hello") + &chosen + respond;
    assert_eq!(text(vllm, &body), Ok(expected(&format!("{{\"description\":null,\"name\":\"f\",{parameters}}}"))));
    assert_eq!(text(sglang, &body), Ok(expected(&format!("{{\"name\":\"f\",{parameters}}}"))));
    for (body, what) in [
        (json!({"messages": [{"role": "user", "content": "a <|open|> b"}]}), "text that spells a special token"),
        (
            json!({"messages": hello, "chat_template_kwargs": {"thinking_effort": "medium"}}),
            "a thinking effort that Kimi-K3 does not have",
        ),
        (
            json!({"messages": hello, "chat_template_kwargs": {"image_prompts": []}}),
            "template arguments of a Kimi-K3 chat",
        ),
    ] {
        assert_eq!(text(vllm, &body), Err(NoBlocks::Unsupported(what)), "{body}");
    }
}

#[test]
fn kimi_k3_segments_are_encoded_apart() {
    let Some(prompter) = kimi_k3() else { return };
    // As one text, the two parts would join.
    let body = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "wor"}, {"type": "text", "text": "ld"}]}], "chat_template_kwargs": {"thinking": false}});
    let prompt = prompter.tokens(Endpoint::Chat, EngineRules::Sglang, body.to_string().as_bytes()).unwrap();
    let segments = [
        "<|open|>",
        "message",
        " role",
        "=\"",
        "user",
        "\"",
        "<|sep|>",
        "wor",
        "ld",
        "<|close|>",
        "message",
        "<|sep|>",
        "<|end_of_msg|>",
        "<|open|>",
        "message",
        " role",
        "=\"",
        "assistant",
        "\"",
        "<|sep|>",
        "<|open|>",
        "response",
        "<|sep|>",
    ];
    let ids = |text: &str| {
        let body = json!({"prompt": text}).to_string();
        prompter.tokens(Endpoint::Completions, EngineRules::Vllm, body.as_bytes()).unwrap().ids
    };
    assert_eq!(prompt.text.as_deref(), Some(segments.concat().as_str()));
    assert_eq!(prompt.ids, segments.iter().flat_map(|segment| ids(segment)).collect::<Vec<u32>>());
    assert_ne!(prompt.ids, ids(&segments.concat()));
    let blocks = prompter.blocks(Endpoint::Chat, EngineRules::Sglang, body.to_string().as_bytes(), 4).unwrap();
    assert_eq!(blocks, prompt.blocks(4));
}

#[test]
fn tiktoken_models_encode_as_the_kimi_wrapper_does() {
    let Some(ranks) = fetched("tiktoken", "tiktoken.model") else { return };
    let config = fixture("kimi_tokenizer_config.json");
    let directory = model(&ranks, &[("tokenizer_config.json", &config)]);
    for choice in [EncoderChoice::Checked, EncoderChoice::Reference] {
        let prompter = Prompter::load(directory.path(), PrompterOptions { encoder: choice, ..options() }).unwrap();
        let fast = choice == EncoderChoice::Checked;
        assert_eq!(prompter.encoder_name(), if fast { "fastokens" } else { "tokenizers" });
        let (mut checked, mut wrong) = (0, Vec::new());
        for line in lines("tiktoken.jsonl") {
            let text = match line.get("repeat") {
                Some(_) if !fast => continue,
                Some(repeat) => repeat[0].as_str().unwrap().repeat(repeat[1].as_u64().unwrap() as usize),
                None => line["text"].as_str().unwrap().to_owned(),
            };
            checked += 1;
            let body = json!({"prompt": text}).to_string();
            let prompt = prompter.tokens(Endpoint::Completions, EngineRules::Sglang, body.as_bytes());
            let prompt = match prompt {
                Ok(prompt) => prompt,
                Err(refusal) => {
                    wrong.push(format!("refused: {refusal}: {text:.100?}"));
                    continue;
                }
            };
            let digest = Sha256::digest(prompt.ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
            let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            let is_equal = match line.get("ids") {
                Some(ids) => *ids == json!(prompt.ids),
                None => line["ids_sha256"] == digest,
            };
            if !is_equal {
                wrong.push(format!("{text:.200?}\n  ours   {:.200?}\n  theirs {}", prompt.ids, line["ids"]));
            }
            let blocks = prompter.blocks(Endpoint::Completions, EngineRules::Sglang, body.as_bytes(), 16).unwrap();
            assert_eq!(blocks, prompt.blocks(16), "{text:.100?}");
        }
        // vLLM takes added tokens out first: only a stretch between them can be too long.
        let ids = |text: &str, engine| {
            let body = json!({"prompt": text}).to_string();
            prompter.tokens(Endpoint::Completions, engine, body.as_bytes()).unwrap().ids
        };
        let (vllm, sglang) = (EngineRules::Vllm, EngineRules::Sglang);
        let part = "<|im_end|>ab";
        assert_eq!(ids(&part.repeat(9_000), vllm), ids(part, vllm).repeat(9_000));
        let (few, many) = ("ab".repeat(12_500), "ab".repeat(12_502));
        assert_eq!(
            ids(&format!("<|im_end|>{many}"), vllm),
            [ids("<|im_end|>", vllm), ids(&few, vllm), ids("abab", vllm)].concat()
        );
        assert_eq!(ids(&many, vllm), ids(&many, sglang));
        all_equal("tiktoken", checked, &wrong);
    }
    let other = config.replace("tokenization_kimi", "tokenization_other");
    let directory = model(&ranks, &[("tokenizer_config.json", &other)]);
    let error = Prompter::load(directory.path(), options()).err().unwrap();
    assert!(error.to_string().contains("is not known here"), "{error}");
}
