//! Chats that engines render in code, Responses bodies and tiktoken models, against recorded answers of the engines'
//! own functions (`tests/differential/record_native.py`, `record_tiktoken.py`).
//!
//! Needs the tokenizers of `tests/setup/fetch_tokenizers.sh`. Without them the tests say which did not run; with
//! `INFERA_REQUIRE_TOKENIZERS=1` that is a failure.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use infera_router::prompt::{EncoderChoice, Endpoint, EngineRules, NoBlocks, Prompter, PrompterOptions};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// 2026-01-15 12:00 UTC, the clock of the recordings.
const RECORDED_AT_S: u64 = 1_768_478_400;

fn fetched(name: &str, file: &str) -> Option<PathBuf> {
    let store = std::env::var_os("INFERA_TOKENIZERS_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tokenizers"), PathBuf::from);
    let path = store.join(name).join(file);
    if path.is_file() {
        return Some(path);
    }
    let message = format!("NOT RUN: {} is not there; run tests/setup/fetch_tokenizers.sh", path.display());
    assert!(std::env::var_os("INFERA_REQUIRE_TOKENIZERS").is_none_or(|value| value != "1"), "{message}");
    eprintln!("{message}");
    None
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
        (r#"{"architectures": ["KimiK3ForConditionalGeneration"]}"#, "Kimi-K3 chats"),
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
            let prompt = prompter.tokens(Endpoint::Completions, EngineRules::Vllm, body.as_bytes());
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
            let blocks = prompter.blocks(Endpoint::Completions, EngineRules::Vllm, body.as_bytes(), 16).unwrap();
            assert_eq!(blocks, prompt.blocks(16), "{text:.100?}");
        }
        all_equal("tiktoken", checked, &wrong);
    }
    let other = config.replace("tokenization_kimi", "tokenization_other");
    let directory = model(&ranks, &[("tokenizer_config.json", &other)]);
    let error = Prompter::load(directory.path(), options()).err().unwrap();
    assert!(error.to_string().contains("is not known here"), "{error}");
}
