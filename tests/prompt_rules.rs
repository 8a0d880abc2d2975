//! The engines' rules around templates and tokenizers, on a byte tokenizer and templates of a line or two.
//!
//! Ids are bytes, `<s>` is 256 and `</s>` 257, so expectations can be read.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use infera_router::hash::prompt_blocks;
use infera_router::prompt::{
    Attempt, Endpoint, EngineRules, NoBlocks, Prompt, Prompter, PrompterOptions, Variant, attempt,
    tokens_without_tokenizer,
};
use serde_json::json;
use tempfile::TempDir;

const BOS: u32 = 256;

/// The printable stand-in of each byte in a byte-level vocabulary.
fn byte_names() -> Vec<String> {
    let plain = |byte: u32| (33..=126).contains(&byte) || (161..=172).contains(&byte) || (174..=255).contains(&byte);
    let mut shifted = 256;
    let name = |byte: u32| {
        let code = if plain(byte) {
            byte
        } else {
            shifted += 1;
            shifted - 1
        };
        char::from_u32(code).unwrap().to_string()
    };
    (0..256).map(name).collect()
}

fn write_model(directory: &Path, adds_bos: bool, config: serde_json::Value) {
    let vocabulary: serde_json::Map<String, serde_json::Value> =
        byte_names().into_iter().enumerate().map(|(id, name)| (name, json!(id))).collect();
    let special = |id: u32, text: &str| json!({"id": id, "content": text, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
    let post = if adds_bos {
        json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}}})
    } else {
        json!(null)
    };
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(256, "<s>"), special(257, "</s>")],
        "normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": post, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": []}});
    std::fs::write(directory.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(directory.join("tokenizer_config.json"), config.to_string()).unwrap();
}

struct Model {
    prompter: Prompter,
    _directory: TempDir,
}

fn model_with(adds_bos: bool, config: serde_json::Value, options: PrompterOptions) -> Model {
    let directory = TempDir::new().unwrap();
    write_model(directory.path(), adds_bos, config);
    Model { prompter: Prompter::load(directory.path(), options).unwrap(), _directory: directory }
}

fn model(template: &str) -> Model {
    model_with(
        true,
        json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}),
        PrompterOptions::default(),
    )
}

impl Model {
    fn chat(&self, engine: EngineRules, body: &str) -> Result<Prompt, NoBlocks> {
        self.prompter.tokens(Endpoint::Chat, engine, body.as_bytes())
    }

    /// Rendered text, or the reason for none.
    fn text(&self, engine: EngineRules, body: &str) -> String {
        match self.chat(engine, body) {
            Ok(prompt) => prompt.text.unwrap(),
            Err(refusal) => format!("!{}", refusal.reason()),
        }
    }

    fn completion(&self, body: &str) -> Result<Vec<u32>, &'static str> {
        let prompt = self.prompter.tokens(Endpoint::Completions, EngineRules::Vllm, body.as_bytes());
        prompt.map(|prompt| prompt.ids).map_err(|refusal| refusal.reason())
    }
}

use EngineRules::{Sglang, Vllm};

#[test]
fn b27_begin_of_sequence_comes_once() {
    let model = model("{{ bos_token }}{{ messages[0].content }}");
    let ids = |body| model.chat(Vllm, body).unwrap().ids;
    assert_eq!(ids(r#"{"messages":[{"role":"user","content":"hi"}]}"#), [BOS, 104, 105]);
    assert_eq!(ids(r#"{"messages":[{"role":"user","content":"hi"}],"add_special_tokens":true}"#), [BOS, BOS, 104, 105]);
    for (body, expected) in [
        (r#"{"prompt":"hi"}"#, Ok(vec![BOS, 104, 105])),
        (r#"{"prompt":"hi","add_special_tokens":false}"#, Ok(vec![104, 105])),
        (r#"{"prompt":""}"#, Ok(vec![BOS])),
        (r#"{"prompt":" "}"#, Ok(vec![BOS, 32])),
        (r#"{"prompt":[1,2,3]}"#, Ok(vec![1, 2, 3])),
        (r#"{"prompt":["a","b"]}"#, Ok(vec![BOS, 97])),
        (r#"{"prompt":[[1],[2]]}"#, Ok(vec![1])),
        (r#"{"prompt":[]}"#, Err("no_prompt")),
        (r#"{"prompt":[-1]}"#, Err("no_prompt")),
        (r#"{"prompt":[1.0]}"#, Err("no_prompt")),
        (r#"{"prompt":[4294967296]}"#, Err("no_prompt")),
        (r#"{"prompt":null}"#, Err("no_prompt")),
        (r#"{}"#, Err("no_prompt")),
        (r#"{"prompt":"a","suffix":"b"}"#, Err("unsupported")),
        (r#"{"prompt":"a""#, Err("bad_json")),
        (r#"[1]"#, Err("bad_json")),
    ] {
        assert_eq!(model.completion(body), expected, "{body}");
    }
}

#[test]
fn the_configs_own_words_replace_the_tokenizers_rule() {
    for (adds_bos, config, expected) in [
        (true, json!({"bos_token": "<s>", "add_bos_token": false}), vec![104]),
        (false, json!({"bos_token": "<s>", "add_bos_token": true}), vec![BOS, 104]),
        (false, json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_eos_token": true}), vec![104, 257]),
        (false, json!({}), vec![104]),
        (true, json!({}), vec![BOS, 104]),
    ] {
        let model = model_with(adds_bos, config.clone(), PrompterOptions::default());
        assert_eq!(model.completion(r#"{"prompt":"h"}"#).unwrap(), expected, "{config}");
    }
}

#[test]
fn b25_content_reaches_the_template_in_the_form_it_asks_for() {
    let text = model("{% for message in messages %}[{{ message.content }}]{% endfor %}");
    let parts = model(
        "{% for message in messages %}[{% for part in message.content %}{{ part.type }}:{{ part.text }};{% endfor %}]{% endfor %}",
    );
    let body = |content: &str| format!(r#"{{"messages":[{{"role":"user","content":{content}}}]}}"#);
    let two = r#"[{"type":"text","text":"hello"},{"type":"text","text":"world"}]"#;
    let image = r#"[{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":"u"}}]"#;
    for (content, vllm_text, sglang_text, vllm_parts, sglang_parts) in [
        (r#""hello\nworld""#, "[hello\nworld]", "[hello\nworld]", "[text:hello\nworld;]", "[:;:;:;:;:;:;:;:;:;:;:;]"),
        (two, "[hello\nworld]", "[hello world]", "[text:hello;text:world;]", "[text:hello;text:world;]"),
        ("null", "[]", "[]", "[]", "[]"),
        ("[]", "[]", "[]", "[]", "[]"),
        (image, "!multimodal", "!multimodal", "!multimodal", "!multimodal"),
        (r#"[{"text":"x"}]"#, "!unsupported", "!unsupported", "!unsupported", "!unsupported"),
        (r#"[{"type":"input_text","text":"x"}]"#, "[x]", "[x]", "[text:x;]", "[text:x;]"),
        (
            r#"[{"type":"text","text":""},{"type":"text","text":"x"}]"#,
            "[x]",
            "[ x]",
            "[text:;text:x;]",
            "[text:;text:x;]",
        ),
    ] {
        let body = body(content);
        assert_eq!(text.text(Vllm, &body), vllm_text, "{content}");
        assert_eq!(text.text(Sglang, &body), sglang_text, "{content}");
        assert_eq!(parts.text(Vllm, &body), vllm_parts, "{content}");
        assert_eq!(parts.text(Sglang, &body), sglang_parts, "{content}");
    }
}

#[test]
fn b24_tool_call_arguments_become_objects() {
    let model = model(
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{{ call.function.arguments is string }}{% endfor %}{% endfor %}",
    );
    let body = |arguments: &str| {
        format!(
            r#"{{"messages":[{{"role":"user","content":"u"}},{{"role":"assistant","content":null,"tool_calls":[{{"id":"c1","type":"function","function":{{"name":"f"{arguments}}}}}]}},{{"role":"tool","tool_call_id":"c1","content":"r"}}]}}"#
        )
    };
    for (arguments, vllm, sglang) in [
        (
            r#","arguments":"{\"city\": \"SF\", \"n\": 1.0}""#,
            r#"{"city": "SF", "n": 1.0}False"#,
            r#"{"city": "SF", "n": 1.0}False"#,
        ),
        (r#","arguments":"""#, "{}False", "!unsupported"),
        (r#","arguments":"{}""#, "{}False", "{}False"),
        (r#","arguments":"[1]""#, "{}False", "!unsupported"),
        (r#","arguments":"not json""#, "{}False", "!unsupported"),
        (r#","arguments":"{\"a\":1,\"a\":2}""#, r#"{"a": 2}False"#, r#"{"a": 2}False"#),
        (r#","arguments":{"z":1,"a":2}"#, r#"{"z": 1, "a": 2}False"#, r#"{"z": 1, "a": 2}False"#),
        ("", "{}False", "nullFalse"),
        (r#","arguments":"{\"a\":\"\\ud83d\"}""#, "!unsupported", "!unsupported"),
    ] {
        assert_eq!(model.text(Vllm, &body(arguments)), vllm, "{arguments}");
        assert_eq!(model.text(Sglang, &body(arguments)), sglang, "{arguments}");
    }
}

#[test]
fn b28_tools_are_written_again_as_the_engines_type_them() {
    let model = model("{{ tools | tojson }}");
    let body = |more: &str| format!(r#"{{"messages":[{{"role":"user","content":"u"}}]{more}}}"#);
    let bare = r#","tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}},"x":1}}]"#;
    let full =
        r#","tools":[{"function":{"strict":true,"description":"d","name":"f","parameters":null},"type":"function"}]"#;
    let vllm_bare = r#"[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"type": "object", "properties": {}}}}]"#;
    let sglang_bare = r#"[{"type": "function", "function": {"description": null, "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": false}, "defer_loading": null}]"#;
    let vllm_full =
        r#"[{"type": "function", "function": {"name": "f", "description": "d", "parameters": null, "strict": true}}]"#;
    let sglang_full = r#"[{"type": "function", "function": {"description": "d", "name": "f", "parameters": null, "strict": true}, "defer_loading": null}]"#;
    for (more, vllm, sglang) in [
        (bare.to_owned(), vllm_bare, sglang_bare),
        (full.to_owned(), vllm_full, sglang_full),
        (format!(r#"{bare},"tool_choice":"none""#), vllm_bare, "null"),
        (format!(r#"{bare},"tool_choice":{{"type":"function","function":{{"name":"other"}}}}"#), vllm_bare, "null"),
        (r#","tools":[]"#.to_owned(), "null", "null"),
        (r#","tools":null"#.to_owned(), "null", "null"),
        (r#","tools":[{"type":"function"}]"#.to_owned(), "!bad_json", "!bad_json"),
    ] {
        assert_eq!(model.text(Vllm, &body(&more)), vllm, "{more}");
        assert_eq!(model.text(Sglang, &body(&more)), sglang, "{more}");
    }
}

#[test]
fn b29_a_template_that_refuses_or_fails_costs_locality_only() {
    let model = model(
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns = 1 %}{% endif %}{% endfor %}{% if messages[0].role != 'user' %}{{ raise_exception('No user query found') }}{% endif %}{{ messages[0].content }}",
    );
    for engine in [Vllm, Sglang] {
        let prefill = r#"{"messages":[{"role":"tool","content":"prefill","tool_call_id":"c"}]}"#;
        let refused = model.chat(engine, prefill).unwrap_err();
        assert_eq!(refused, NoBlocks::TemplateRefused("No user query found".into()));
        for body in [
            r#"{"messages":[]}"#,
            r#"{"messages":null}"#,
            "{}",
            r#"{"messages":{}}"#,
            r#"{"messages":[1]}"#,
            r#"{"messages":[{"content":"x"}]}"#,
            r#"{"messages":[{"role":7,"content":"x"}]}"#,
            r#"{"messages":[{"role":"user","content":7}]}"#,
            r#"{"messages":[{"role":"user","content":"x"}],"tools":"all"}"#,
            r#"{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":[]}"#,
            r#"{"messages":[{"role":"user","content":"\ud800"}]}"#,
        ] {
            assert!(model.chat(engine, body).is_err(), "{body}");
        }
        let turn = r#"{"role":"user","content":"x"},"#.repeat(10_000);
        let many = format!(r#"{{"messages":[{}]}}"#, turn.trim_end_matches(','));
        assert_eq!(model.text(engine, &many), "x");
        let long = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "y".repeat(2 << 20));
        assert_eq!(model.text(engine, &long).len(), 2 << 20);
    }
}

#[test]
fn runaway_templates_stop() {
    let nested = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}";
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}";
    let huge =
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}";
    let replaced = "{{ ('x' * 100000).replace('x', 'y' * 100000) }}";
    for (template, reason) in
        [(nested, "template_failed"), (endless, "too_long"), (huge, "too_long"), (replaced, "too_long")]
    {
        let model = model(template);
        let refused = model.chat(Vllm, r#"{"messages":[{"role":"user","content":"u"}]}"#).unwrap_err();
        assert_eq!(refused.reason(), reason, "{template}: {refused}");
    }
}

#[test]
fn a_model_whose_template_does_not_compile_still_loads() {
    let model = model("{% frobnicate %}");
    assert_eq!(model.text(Vllm, r#"{"messages":[{"role":"user","content":"u"}]}"#), "!template_failed");
    assert_eq!(model.completion(r#"{"prompt":"h"}"#), Ok(vec![BOS, 104]));
    let without = model_with(true, json!({"bos_token": "<s>"}), PrompterOptions::default());
    assert_eq!(without.text(Vllm, r#"{"messages":[{"role":"user","content":"u"}]}"#), "!no_template");
}

#[test]
fn models_that_engines_render_by_code_are_refused() {
    let directory = TempDir::new().unwrap();
    write_model(directory.path(), true, json!({"chat_template": "{{ messages[0].content }}", "bos_token": "<s>"}));
    let body = br#"{"messages":[{"role":"user","content":"u"}]}"#;
    for (architecture, expected) in [("DeepseekV32ForCausalLM", "unsupported"), ("Qwen3ForCausalLM", "")] {
        let config = json!({"architectures": [architecture]}).to_string();
        std::fs::write(directory.path().join("config.json"), config).unwrap();
        let prompter = Prompter::load(directory.path(), PrompterOptions::default()).unwrap();
        let refused = prompter.tokens(Endpoint::Chat, Vllm, body).err();
        assert_eq!(refused.as_ref().map_or("", NoBlocks::reason), expected, "{architecture}");
        assert!(prompter.tokens(Endpoint::Completions, Vllm, br#"{"prompt":"h"}"#).is_ok());
    }
}

#[test]
fn named_templates_are_chosen_as_transformers_does() {
    let config = json!({"chat_template": [
        {"name": "default", "template": "default"}, {"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "rag"}]});
    let model = model_with(false, config, PrompterOptions::default());
    let tools = r#"{"messages":[{"role":"user","content":"u"}],"tools":[{"type":"function","function":{"name":"f"}}]}"#;
    assert_eq!(model.text(Vllm, tools), "tools");
    assert_eq!(model.text(Vllm, r#"{"messages":[{"role":"user","content":"u"}]}"#), "default");
}

#[test]
fn a_request_brings_its_own_template_only_where_that_is_allowed() {
    let body = r#"{"messages":[{"role":"user","content":"u"}],"chat_template":"own {{ messages[0].content }}"}"#;
    let config = || json!({"chat_template": "ours"});
    let closed = model_with(false, config(), PrompterOptions::default());
    assert_eq!(closed.text(Vllm, body), "!unsupported");
    assert_eq!(closed.text(Sglang, body), "ours");
    let open = PrompterOptions { allow_request_chat_template: true, ..PrompterOptions::default() };
    assert_eq!(model_with(false, config(), open).text(Vllm, body), "own u");
}

/// Templates that a request may bring are hostile until shown otherwise: each ends soon, and none ends the process.
#[test]
fn a_template_of_a_request_is_bounded() {
    let open = PrompterOptions { allow_request_chat_template: true, ..PrompterOptions::default() };
    let model = model_with(false, json!({"chat_template": "ours"}), open);
    let reason = |template: &str, content: &str| {
        let body = json!({"messages": [{"role": "user", "content": content}], "chat_template": template});
        model.chat(Vllm, &body.to_string()).map_err(|refusal| refusal.reason())
    };
    let long = "x".repeat(64 << 10);
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    assert_eq!(reason(loops, "u"), Err("too_long"), "fuel");
    let output = "{% for a in range(9999) %}{{ messages[0].content }}{% endfor %}";
    assert_eq!(reason(output, &long), Err("too_long"), "output");
    let doubled = "{% set ns = namespace(t=messages[0].content) %}{% for a in range(64) %}\
        {% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}";
    assert_eq!(reason(doubled, &long), Err("too_long"), "memory of a value");
    // A list of 2^64 places, by as many names for one list.
    let shared = "{% set ns = namespace(t=[messages[0].content]) %}\
        {% for a in range(64) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}";
    for printed in ["{{ ns.t }}", "{{ ns.t | tojson }}", "{{ ns.t | string | length }}"] {
        assert_eq!(reason(&format!("{shared}{printed}"), &long), Err("too_long"), "{printed}");
    }
    let deep = "{% set ns = namespace(t=1) %}{% for a in range(99999) %}{% set ns.t = {'a': ns.t} %}{% endfor %}";
    assert!(reason(&format!("{deep}done"), "u").is_ok(), "freed level by level");
    for printed in ["{{ ns.t }}", "{{ ns.t | tojson }}"] {
        assert_eq!(reason(&format!("{deep}{printed}"), "u"), Err("template_failed"), "{printed}");
    }
    let separators = "{{ range(99999) | list | tojson(separators=(messages[0].content, ':')) | length }}";
    assert_eq!(reason(separators, &long), Err("too_long"), "separators");
    let fill = "{{ 'a'.ljust(9999999, messages[0].content) | length }}";
    assert_eq!(reason(fill, &long), Err("template_failed"), "Python fills with one character");
    let recursive = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    assert_eq!(reason(recursive, "u"), Err("template_failed"), "recursion");
    assert_eq!(reason(&"x".repeat((32 << 10) + 1), "u"), Err("too_long"), "the source");
    // As deep as the source may be. Whether such an expression means anything is the compiler's to say; it comes back.
    let levels = [
        ("(", ")"),
        ("[", "]"),
        ("-", ""),
        ("not ", ""),
        ("", "+1"),
        ("", "~1"),
        ("", "[0]"),
        ("", ".a"),
        ("", "|int"),
        ("{% if 1 %}", "{% endif %}"),
        ("{% for a in [1] %}", "{% endfor %}"),
    ];
    for (open, close) in levels {
        let (start, end) = if open.starts_with('{') { ("", "") } else { ("{{ ", " }}") };
        let depth = ((32 << 10) - 16) / (open.len() + close.len());
        let nested = format!("{start}{}1{}{end}", open.repeat(depth), close.repeat(depth));
        let _ = reason(&nested, "u");
        assert!(reason("{{ messages[0].content }}", "u").is_ok(), "{open:?} {close:?}");
    }
}

#[test]
fn roles_and_reasoning_by_engine() {
    let model = model(
        "{% for m in messages %}<{{ m.role }}:{{ m.content }}:{{ m.reasoning_content }}>{% endfor %}{{ add_generation_prompt }}",
    );
    for (messages, vllm, sglang) in [
        (
            r#"{"role":"developer","content":"d"},{"role":"user","content":"u"},{"role":"system","content":"s"}"#,
            "<system:d\n\ns:><user:u:>True",
            "<developer:d:><user:u:><system:s:>True",
        ),
        (
            r#"{"role":"user","content":"u"},{"role":"assistant","content":"a","reasoning":"r"},{"role":"user","content":"v"}"#,
            "<user:u:><assistant:a:r><user:v:>True",
            "<user:u:><assistant:a:><user:v:>True",
        ),
        (
            r#"{"role":"user","content":"u"},{"role":"assistant","content":"a","reasoning_content":"r"},{"role":"user","content":"v"}"#,
            "<user:u:><assistant:a:><user:v:>True",
            "<user:u:><assistant:a:r><user:v:>True",
        ),
        (
            r#"{"role":"user","content":"u"},{"role":"assistant","content":"last"}"#,
            "<user:u:><assistant:last:>True",
            "<user:u:><user:last:>True",
        ),
    ] {
        let body = format!(r#"{{"messages":[{messages}]}}"#);
        assert_eq!(model.text(Vllm, &body), vllm, "{messages}");
        assert_eq!(model.text(Sglang, &body), sglang, "{messages}");
    }
}

#[test]
fn an_open_last_message_is_cut_behind_its_text() {
    let model = model("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}");
    let body = r#"{"messages":[{"role":"user","content":"u"},{"role":"assistant","content":"Roses are "}],"continue_final_message":true,"add_generation_prompt":false}"#;
    assert_eq!(model.text(Vllm, body), "<u><Roses are");
    assert_eq!(model.text(Sglang, body), "<u>Roses are ");
    let both = body.replace(r#","add_generation_prompt":false"#, "");
    assert_eq!(model.text(Vllm, &both), "!unsupported");
}

#[test]
fn template_arguments_by_engine() {
    let model = model("{{ enable_thinking }}|{{ thinking }}|{{ reasoning_effort }}|{{ x }}|{{ bos_token }}");
    let body = |more: &str| format!(r#"{{"messages":[{{"role":"user","content":"u"}}]{more}}}"#);
    for (more, vllm, sglang) in [
        ("", "||||<s>", "||||<s>"),
        (r#","reasoning_effort":"low""#, "True||low||<s>", "True|True|low||<s>"),
        (r#","reasoning_effort":"none""#, "False||none||<s>", "False|False|none||<s>"),
        (
            r#","reasoning_effort":"low","chat_template_kwargs":{"enable_thinking":false}"#,
            "False||low||<s>",
            "False|True|low||<s>",
        ),
        (r#","chat_template_kwargs":{"x":null,"bos_token":"B"}"#, "||||B", "|||None|B"),
        (r#","chat_template_kwargs":{"x":"auto"}"#, "||||<s>", "|||auto|<s>"),
        (r#","reasoning":{"effort":"high"}"#, "||||<s>", "True|True|high||<s>"),
        (r#","reasoning":{"enabled":true}"#, "||||<s>", "True|True|||<s>"),
        (r#","chat_template_kwargs":{"messages":[]}"#, "!unsupported", "!unsupported"),
    ] {
        assert_eq!(model.text(Vllm, &body(more)), vllm, "{more}");
        assert_eq!(model.text(Sglang, &body(more)), sglang, "{more}");
    }
}

#[test]
fn arguments_of_the_server_are_defaults_below_the_requests_own() {
    let kwargs = |text: &str| serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).unwrap();
    let options =
        PrompterOptions { chat_template_kwargs: kwargs(r#"{"x":"fleet","y":1}"#), ..PrompterOptions::default() };
    let model = model_with(false, json!({"chat_template": "{{ x }}|{{ y }}|{{ reasoning_effort }}"}), options);
    let body = |more: &str| format!(r#"{{"messages":[{{"role":"user","content":"u"}}]{more}}}"#);
    let own = r#","chat_template_kwargs":{"x":"own"}"#;
    for engine in [Vllm, Sglang] {
        assert_eq!(model.text(engine, &body("")), "fleet|1|");
        assert_eq!(model.text(engine, &body(own)), "own|1|");
        // A worker's own arguments replace the fleet's.
        let worker = Variant::of(&kwargs(r#"{"x":"worker","reasoning_effort":"low"}"#)).unwrap();
        for (more, expected) in [("", "worker||low"), (own, "own||low")] {
            let Ok(Attempt::Ready(blocks)) =
                model.prompter.attempt(Endpoint::Chat, engine, Some(&worker), body(more).as_bytes(), &[1], usize::MAX)
            else {
                panic!("blocks")
            };
            let bytes: Vec<u32> = expected.bytes().map(u32::from).collect();
            assert_eq!(*blocks[0].hashes, prompt_blocks(&bytes, 1), "{more}");
        }
    }
}

#[test]
fn token_ids_need_no_tokenizer() {
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        let prompt = tokens_without_tokenizer(endpoint, br#"{"prompt":[1,2,3,4],"messages":[]}"#).unwrap();
        assert_eq!(prompt, Prompt { text: None, ids: vec![1, 2, 3, 4] });
        let blocks = |endpoint, engine, body: &[u8], block_size| {
            attempt(None, endpoint, engine, None, body, &[block_size], 0).map(|attempt| match attempt {
                Attempt::Ready(mut blocks) => blocks.remove(0),
                Attempt::Later(_) => panic!("token ids need no encoding"),
            })
        };
        let found = blocks(endpoint, Vllm, br#"{"prompt":[1,2,3,4,5]}"#, 4).unwrap();
        assert_eq!((found.hashes[0].0, found.hashes.len(), found.tokens), (0x341839abbe30be0b, 1, 5));
        assert_eq!(blocks(endpoint, Vllm, br#"{"prompt":"text"}"#, 4), Err(NoBlocks::NoTokenizer));
        assert_eq!(blocks(endpoint, Vllm, br#"{"prompt":"te"#, 4), Err(NoBlocks::BadJson));
        assert_eq!(blocks(endpoint, Vllm, b"\xff", 4), Err(NoBlocks::BadJson));
    }
}

/// vLLM keys the blocks of a salted request apart, SGLang also those of an adapter or an extra key: what the plain namespace
/// holds of the same text is not there for them.
#[test]
fn a_namespace_of_the_requests_own_gets_no_plain_credit() {
    let check = |member: &str, has_blocks: bool| {
        let body = format!(r#"{{"prompt":[1,2,3,4],{member}}}"#);
        let found = attempt(None, Endpoint::Completions, Vllm, None, body.as_bytes(), &[4], 0).map(drop);
        let expected = Err(NoBlocks::Unsupported("a cache namespace of the request's own"));
        if has_blocks { assert!(found.is_ok(), "{body}") } else { assert_eq!(found, expected, "{body}") }
    };
    for name in ["cache_salt", "extra_key", "lora_path"] {
        check(&format!(r#""{name}":"tenant""#), false);
        check(&format!(r#""{name}":["a"]"#), false);
        check(&format!(r#""{name}":null"#), true);
        check(&format!(r#""{name}":"""#), true);
        check(&format!(r#""metadata":{{"{name}":"tenant"}}"#), true);
    }
}
