//! Function tools as TypeScript declarations, as harmony shows them to gpt-oss.
//!
//! Source: `json_schema_to_typescript` and `template_tools_section` of `openai-harmony` 0.0.11. Schemas with what is
//! not modelled here (`oneOf`, `examples`, defaults that are no plain text, integer or boolean) are refused.

use super::super::NoBlocks;
use super::super::tree::{Map, Tree};

/// Nesting of schemas beyond which a tool is refused.
const DEPTH_MAX: usize = 64;

/// Writes one function of the namespace, with the blank line behind it.
pub fn write_function(out: &mut String, function: &Map<'_>) -> Result<(), NoBlocks> {
    let Some(Tree::Text(name)) = function.get("name") else { return Err(NoBlocks::BadJson) };
    for line in rust_lines(text(function, "description").unwrap_or_default()) {
        out.push_str("// ");
        out.push_str(line);
        out.push('\n');
    }
    match function.get("parameters").filter(|parameters| !parameters.is_null()) {
        None => out.push_str(&format!("type {name} = () => any;\n\n")),
        Some(Tree::Map(schema)) => {
            out.push_str(&format!("type {name} = (_: {}) => any;\n\n", type_of(schema, "", 0)?));
        }
        Some(_) => return Err(NoBlocks::BadJson),
    }
    Ok(())
}

fn text<'m>(map: &'m Map<'_>, name: &str) -> Option<&'m str> {
    map.get(name).and_then(Tree::as_text)
}

/// Lines as the library splits them: at `\n` and `\r\n`, without an empty one at the end.
fn rust_lines(text: &str) -> std::str::Lines<'_> {
    text.lines()
}

fn type_of(schema: &Map<'_>, indent: &str, depth: usize) -> Result<String, NoBlocks> {
    if depth > DEPTH_MAX {
        return Err(NoBlocks::TooLong);
    }
    if schema.get("oneOf").is_some() {
        return Err(NoBlocks::Unsupported("oneOf in a tool of a harmony model"));
    }
    if let Some(Tree::List(kinds)) = schema.get("type") {
        let kinds: Vec<&str> = kinds.iter().filter_map(Tree::as_text).map(mapped).collect();
        return Ok(if kinds.is_empty() { "any".into() } else { kinds.join(" | ") });
    }
    Ok(match text(schema, "type") {
        Some("object") => object(schema, indent, depth)?,
        Some("string") => enumeration(schema).unwrap_or_else(|| "string".into()),
        Some("number" | "integer") => "number".into(),
        Some("boolean") => "boolean".into(),
        Some("array") => match schema.get("items") {
            None => "Array<any>".into(),
            Some(Tree::Map(items)) => format!("{}[]", type_of(items, indent, depth + 1)?),
            Some(_) => "any[]".into(),
        },
        _ => "any".into(),
    })
}

fn mapped(kind: &str) -> &str {
    if kind == "integer" { "number" } else { kind }
}

fn enumeration(schema: &Map<'_>) -> Option<String> {
    let Some(Tree::List(values)) = schema.get("enum") else { return None };
    let values: Vec<String> = values.iter().filter_map(Tree::as_text).map(|text| format!("\"{text}\"")).collect();
    (!values.is_empty()).then(|| values.join(" | "))
}

fn object(schema: &Map<'_>, indent: &str, depth: usize) -> Result<String, NoBlocks> {
    let mut out = String::new();
    if let Some(description) = text(schema, "description") {
        out.push_str(&format!("{indent}// {description}\n"));
    }
    out.push_str("{\n");
    let required: Vec<&str> = match schema.get("required") {
        Some(Tree::List(names)) => names.iter().filter_map(Tree::as_text).collect(),
        _ => Vec::new(),
    };
    if let Some(Tree::Map(properties)) = schema.get("properties") {
        for (name, value) in &properties.0 {
            let empty = Map::default();
            let value = match value {
                Tree::Map(value) => value,
                _ => &empty,
            };
            let mark = if required.contains(&name.as_ref()) { "" } else { "?" };
            property(&mut out, &format!("{name}{mark}"), value, indent, depth)?;
        }
    }
    out.push_str(indent);
    out.push('}');
    Ok(out)
}

fn property(out: &mut String, name: &str, value: &Map<'_>, indent: &str, depth: usize) -> Result<(), NoBlocks> {
    if value.get("examples").is_some() {
        return Err(NoBlocks::Unsupported("examples in a tool of a harmony model"));
    }
    if let Some(title) = text(value, "title") {
        out.push_str(&format!("{indent}// {title}\n{indent}//\n"));
    }
    if let Some(description) = text(value, "description") {
        out.push_str(&format!("{indent}// {description}\n"));
    }
    let mut kind = type_of(value, &format!("{indent}    "), depth + 1)?;
    if value.get("nullable") == Some(&Tree::Bool(true)) && !kind.contains("null") {
        kind.push_str(" | null");
    }
    out.push_str(&format!("{indent}{name}: {kind},"));
    if let Some(default) = value.get("default") {
        let is_enum = matches!(value.get("enum"), Some(Tree::List(values)) if !values.is_empty());
        let shown = match default {
            Tree::Text(text) if is_enum => text.to_string(),
            Tree::Text(text) => format!("\"{text}\""),
            Tree::Bool(value) => value.to_string(),
            Tree::Null => "null".into(),
            Tree::Integer(digits) if digits.parse::<i64>().is_ok() => digits.to_string(),
            _ => return Err(NoBlocks::Unsupported("a default in a tool of a harmony model")),
        };
        out.push_str(&format!(" // default: {shown}"));
    }
    out.push('\n');
    Ok(())
}
