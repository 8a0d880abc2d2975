//! Small templates, one feature each, against what Hugging Face's environment prints for them.

use std::time::{Duration, SystemTime};

use super::template::ChatTemplate;
use super::tree::Tree;
use crate::prompt::{EngineRules, NoBlocks};

/// Recorded by `tests/differential/record_templates.py`; the first line is the context of all others.
const FEATURES: &str = include_str!("../../tests/fixtures/templates/features.jsonl");

fn clock() -> Option<SystemTime> {
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_768_478_400))
}

/// Features that are refused here, so that the request is routed by load: never printed otherwise than Python.
const REFUSED_HERE: [&str; 34] = [
    "cycler(",
    "truncate(4, true",
    "% ('a', 3)",
    "{{ +n }}",
    "{% with a = 1, b = a %}",
    "{% raw %}\n",
    "reverse=true) }}",
    "dictsort(true)",
    "max(attribute",
    "unique(true)",
    "sort(true, true)",
    "varargs",
    "macro a(x, y=x)",
    "namespace({",
    "{!r}",
    "{:,}",
    ".encode()",
    ".isidentifier()",
    ".expandtabs(",
    ".find('c', 1)",
    ".rfind('a', 0, 3)",
    ".count('a', 1)",
    ".endswith('b', 0, 2)",
    ".isnumeric()",
    ".istitle()",
    ".isascii()",
    ".isdecimal()",
    "int(0, 16)",
    "'floor')",
    "'ceil')",
    "| urlencode",
    "| wordwrap",
    ".isdigit() }}",
    "\\U0001F600",
];

#[test]
fn b23_templates_print_what_python_prints() {
    let mut lines = FEATURES.lines();
    let context = Tree::parse(lines.next().unwrap()).unwrap();
    let Tree::Map(context) = context else { panic!("a map") };
    let context = context.get("context").unwrap().to_value();
    let mut wrong = Vec::new();
    for line in lines {
        let case: serde_json::Value = serde_json::from_str(line).unwrap();
        let template = case["template"].as_str().unwrap();
        let rendered = match ChatTemplate::compile(template, clock()) {
            Ok(compiled) => compiled.render(context.clone(), 100),
            Err(error) => Err(NoBlocks::TemplateFailed(format!("compile: {error}"))),
        };
        match (&rendered, case["text"].as_str()) {
            (Ok(text), Some(expected)) if text == expected => {}
            (Err(_), None) => {}
            (Err(_), Some(_)) if REFUSED_HERE.iter().any(|part| template.contains(part)) => {}
            _ => wrong.push(format!(
                "{template:?}\n  ours   {rendered:?}\n  theirs {}",
                case.get("text").unwrap_or(&case["error"])
            )),
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}

/// Expected of the fixtures: what Jinja says to the same probe, bare as the engines' own is.
#[test]
fn whether_a_late_system_message_stays_where_it_is() {
    let check = |template: &str, expected: [bool; 2]| {
        let template = ChatTemplate::compile(template, clock()).unwrap();
        let found = [EngineRules::Vllm, EngineRules::Sglang].map(|rules| template.takes_late_system(rules));
        assert_eq!(found, expected, "{}", &template.source()[..template.source().len().min(200)]);
    };
    check(include_str!("../../tests/fixtures/templates/llama3_1_tools.jinja"), [true, true]);
    // It asks for the time, which the probe has not.
    check(include_str!("../../tests/fixtures/templates/gptoss.jinja"), [false, false]);
    check("{% for m in messages %}{{ m.content }}{% endfor %}", [true, true]);
    check(
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
        [true, false],
    );
    check(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
        [false, false],
    );
    check("{% for m in messages %}{{ bos_token + m.content }}{% endfor %}", [false, false]);
}
