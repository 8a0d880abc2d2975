//! Whether a template wants message content as one string or as a list of parts, decided as the engines do it.
//!
//! The engines walk the template's syntax tree for a loop over a message's `content`. This module reads the same
//! from the block tags alone: `{% for %}` and `{% set %}` are the only statements their walk looks at.

use super::EngineRules;

/// The form of `content` that a template is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentForm {
    /// Text parts joined to one string.
    Text,
    /// A list of parts, strings wrapped as one text part.
    Parts,
}

/// The form `source` is rendered with under the given engine's rule.
pub fn of_template(source: &str, rules: EngineRules) -> ContentForm {
    let tags = statements(source);
    let parts = match rules {
        EngineRules::Vllm => loops_over_content_vllm(&tags),
        EngineRules::Sglang => {
            ["image", "audio", "video", "vision"].iter().any(|word| source.contains(word))
                || tags.iter().any(|tag| match tag {
                    Statement::For { over, .. } => {
                        ["message", "msg", "m"].iter().any(|name| over.reads(name, Some("content")))
                    }
                    Statement::Set { .. } => false,
                })
        }
    };
    if parts { ContentForm::Parts } else { ContentForm::Text }
}

/// vLLM follows assignments: what is assigned from `messages` (or a slice of it) counts as `messages`, a loop
/// variable over that is a message, and a loop over such a message's `content` decides.
fn loops_over_content_vllm(tags: &[Statement<'_>]) -> bool {
    let lists = closure(tags, "messages", None);
    let items: Vec<&str> = tags
        .iter()
        .filter_map(|tag| match tag {
            Statement::For { target, over } if lists.iter().any(|list| over.reads(list, None)) => Some(*target),
            _ => None,
        })
        .collect();
    tags.iter().any(|tag| match tag {
        Statement::For { over, .. } => items.iter().any(|item| over.reads(item, Some("content"))),
        Statement::Set { .. } => false,
    })
}

/// `name` and every variable assigned from it, directly or through others.
fn closure<'s>(tags: &[Statement<'s>], name: &'s str, key: Option<&str>) -> Vec<&'s str> {
    let mut names = vec![name];
    let mut next = 0;
    while let Some(name) = names.get(next).copied() {
        next += 1;
        for tag in tags {
            if let Statement::Set { target, value } = tag
                && value.reads(name, key)
                && !names.contains(target)
            {
                names.push(target);
            }
        }
    }
    names
}

enum Statement<'s> {
    For { target: &'s str, over: Access<'s> },
    Set { target: &'s str, value: Access<'s> },
}

/// A variable, or one member of it, under any filters, tests and slices; anything else reads nothing.
#[derive(Debug, Default, PartialEq)]
struct Access<'s> {
    variable: Option<&'s str>,
    member: Option<&'s str>,
}

impl Access<'_> {
    fn reads(&self, variable: &str, member: Option<&str>) -> bool {
        self.variable == Some(variable) && self.member == member
    }
}

fn statements(source: &str) -> Vec<Statement<'_>> {
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let body = &rest[start + 2..];
        let end = body.find("%}").unwrap_or(body.len());
        found.extend(statement(body[..end].trim_matches(|char: char| char.is_whitespace() || "-+".contains(char))));
        rest = &body[end..];
    }
    found
}

fn statement(tag: &str) -> Option<Statement<'_>> {
    let (word, rest) = tag.split_once(char::is_whitespace)?;
    let rest = rest.trim_start();
    match word {
        "for" => {
            let (target, over) = rest.split_once(" in ")?;
            Some(Statement::For { target: identifier(target.trim())?, over: access(over) })
        }
        "set" => {
            let (target, value) = rest.split_once('=')?;
            Some(Statement::Set { target: identifier(target.trim())?, value: access(value) })
        }
        _ => None,
    }
}

fn identifier(text: &str) -> Option<&str> {
    let ok = !text.is_empty() && text.chars().all(|char| char.is_alphanumeric() || char == '_');
    ok.then_some(text)
}

/// Reads an expression of the one shape that counts; stops at the first thing outside of it.
fn access(text: &str) -> Access<'_> {
    let text = text.trim_start().trim_start_matches('(').trim_start();
    let end = text.find(|char: char| !(char.is_alphanumeric() || char == '_')).unwrap_or(text.len());
    let Some(variable) = identifier(&text[..end]) else { return Access::default() };
    let mut found = Access { variable: Some(variable), member: None };
    let mut rest = text[end..].trim_start();
    loop {
        if let Some(after) = rest.strip_prefix('.') {
            let end = after.find(|char: char| !(char.is_alphanumeric() || char == '_')).unwrap_or(after.len());
            if found.member.is_some() || after[end..].starts_with('(') {
                return Access::default();
            }
            found.member = Some(&after[..end]);
            rest = after[end..].trim_start();
        } else if let Some(after) = rest.strip_prefix('[') {
            let Some(end) = after.find(']') else { return Access::default() };
            let index = after[..end].trim();
            let quoted = index.len() >= 2 && index.starts_with(['\'', '"']) && index.ends_with(['\'', '"']);
            match (quoted, index.contains(':'), found.member) {
                (true, _, None) => found.member = Some(&index[1..index.len() - 1]),
                (false, true, _) => {}
                _ => return Access::default(),
            }
            rest = after[end + 1..].trim_start();
        } else {
            break;
        }
    }
    // Filters and tests leave the access what it is; an operator makes it another expression.
    let plain = rest.is_empty()
        || rest.starts_with([')', '|'])
        || ["is ", "if ", "recursive"].iter().any(|word| rest.starts_with(word));
    if plain { found } else { Access::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, vllm: ContentForm, sglang: ContentForm) {
        assert_eq!(of_template(source, EngineRules::Vllm), vllm, "vllm: {source}");
        assert_eq!(of_template(source, EngineRules::Sglang), sglang, "sglang: {source}");
    }

    #[test]
    fn loops_over_content_ask_for_parts() {
        use ContentForm::{Parts, Text};
        check("{% for message in messages %}{{ message.content }}{% endfor %}", Text, Text);
        check(
            "{% for message in messages %}{% for part in message['content'] %}{% endfor %}{% endfor %}",
            Parts,
            Parts,
        );
        check("{%- for m in messages[1:] -%}{%- for c in m.content -%}{%- endfor -%}{%- endfor -%}", Parts, Parts);
        check(
            "{% set loop_messages = messages %}{% for x in loop_messages %}{% for c in x.content | list %}{% endfor %}{% endfor %}",
            Parts,
            Text,
        );
        check("{% for message in messages %}{% for c in message.tool_calls %}{% endfor %}{% endfor %}", Text, Text);
        check("{# an image #}{% for message in messages %}{% endfor %}", Text, Parts);
        check("{% for c in other.content %}{% endfor %}", Text, Text);
        check(
            "{% for message in messages %}{% set content = message.content %}{% for c in content %}{% endfor %}{% endfor %}",
            Text,
            Text,
        );
    }
}
