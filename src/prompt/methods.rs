//! Python's methods on strings, dicts and lists, called from templates.
//!
//! Own versions where `minijinja-contrib` differs from Python (whitespace, sets of characters, keyword
//! arguments, missing methods); everything else falls through to it.

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::python::{self, is_space};

/// Largest string one method call may make, bytes: templates are trusted with text, not with memory.
const METHOD_OUTPUT_BYTES_MAX: usize = crate::limits::RENDERED_BYTES_MAX;

/// The environment's unknown-method callback.
pub fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let answer = match value.kind() {
        ValueKind::String => string_method(value.as_str().unwrap_or_default(), method, args)?,
        ValueKind::Map => map_method(value, method, args)?,
        ValueKind::Seq | ValueKind::Iterable => list_method(value, method, args)?,
        _ => None,
    };
    match answer {
        Some(answer) => Ok(answer),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn fail<T>(what: impl Into<String>) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, what.into()))
}

/// `Ok(None)`: not one of ours.
fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => Value::from(stripped(text, method, args)?),
        "split" => Value::from(split(text, args, false)?),
        "rsplit" => Value::from(split(text, args, true)?),
        "splitlines" => Value::from(split_lines(text, args)?),
        "replace" => Value::from(replaced(text, args)?),
        "join" => Value::from(joined(text, args)?),
        "title" => Value::from(title(text)),
        "capitalize" => Value::from(capitalized(text)),
        "swapcase" => Value::from(swapped_case(text)),
        "casefold" => Value::from(text.to_lowercase()),
        "isspace" => Value::from(!text.is_empty() && text.chars().all(is_space)),
        // Which other characters count is for Unicode tables that are not here.
        "isdigit" | "isdecimal" | "isnumeric" if !text.is_ascii() => {
            return fail(format!("str.{method} of this text cannot be reproduced here"));
        }
        "isdigit" | "isdecimal" | "isnumeric" => {
            Value::from(!text.is_empty() && text.chars().all(|char| char.is_ascii_digit()))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" | "rpartition" => partition(text, method, args)?,
        "startswith" | "endswith" => Value::from(has_affix(text, method, args)?),
        "index" => match position(text, args)? {
            -1 => return fail("substring not found"),
            at => Value::from(at),
        },
        "find" => Value::from(position(text, args)?),
        "count" => {
            let (what,): (&str,) = from_args(args)?;
            Value::from(if what.is_empty() { text.chars().count() + 1 } else { text.matches(what).count() })
        }
        "ljust" | "rjust" | "center" | "zfill" => Value::from(padded(text, method, args)?),
        "encode" | "decode" | "format_map" | "translate" | "expandtabs" => {
            return fail(format!("str.{method} cannot be reproduced here"));
        }
        _ => return Ok(None),
    }))
}

fn stripped<'t>(text: &'t str, method: &str, args: &[Value]) -> Result<&'t str, Error> {
    let (set,): (Option<&str>,) = from_args(args)?;
    let drops = |char: char| set.map_or_else(|| is_space(char), |set| set.contains(char));
    Ok(match method {
        "lstrip" => text.trim_start_matches(drops),
        "rstrip" => text.trim_end_matches(drops),
        _ => text.trim_matches(drops),
    })
}

/// `split(sep=None, maxsplit=-1)` and its mirror; both arguments also by keyword.
fn split(text: &str, args: &[Value], from_right: bool) -> Result<Vec<Value>, Error> {
    let (separator, limit, kwargs): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = match separator {
        Some(separator) => Some(separator),
        None => kwargs.get::<Option<Value>>("sep")?,
    };
    let limit = match limit {
        Some(limit) => limit,
        None => kwargs.get::<Option<i64>>("maxsplit")?.unwrap_or(-1),
    };
    kwargs.assert_all_used()?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX).saturating_add(1);
    let separator = separator.filter(|separator| !separator.is_none());
    let mut parts: Vec<&str> = match separator.as_ref().map(|separator| separator.as_str()) {
        None => return Ok(split_whitespace(text, limit, from_right).into_iter().map(Value::from).collect()),
        Some(None) => return fail("split needs a string"),
        Some(Some("")) => return fail("empty separator"),
        Some(Some(separator)) if from_right => text.rsplitn(limit, separator).collect(),
        Some(Some(separator)) => text.splitn(limit, separator).collect(),
    };
    if from_right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Runs of whitespace separate. The part at which the limit stops keeps the whitespace at its far end.
fn split_whitespace(text: &str, limit: usize, from_right: bool) -> Vec<&str> {
    let near_trimmed =
        |text| if from_right { str::trim_end_matches(text, is_space) } else { str::trim_start_matches(text, is_space) };
    let mut parts = Vec::new();
    let mut rest = near_trimmed(text);
    while !rest.is_empty() {
        let cut = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = cut.filter(|_| parts.len() + 1 < limit) else {
            parts.push(rest);
            break;
        };
        let after = at + rest[at..].chars().next().map_or(1, char::len_utf8);
        parts.push(if from_right { &rest[after..] } else { &rest[..at] });
        rest = near_trimmed(if from_right { &rest[..at] } else { &rest[after..] });
    }
    if from_right {
        parts.reverse();
    }
    parts
}

fn split_lines(text: &str, args: &[Value]) -> Result<Vec<Value>, Error> {
    let (keep, kwargs): (Option<bool>, Kwargs) = from_args(args)?;
    let keep = keep.or(kwargs.get("keepends")?).unwrap_or(false);
    let mut lines = Vec::new();
    let mut rest = text;
    let ends = |char| {
        matches!(char, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    while !rest.is_empty() {
        let (line, next) = match rest.find(ends) {
            None => (rest.len(), rest.len()),
            Some(at) if rest[at..].starts_with("\r\n") => (at, at + 2),
            Some(at) => (at, at + rest[at..].chars().next().map_or(1, char::len_utf8)),
        };
        lines.push(Value::from(&rest[..if keep { next } else { line }]));
        rest = &rest[next..];
    }
    Ok(lines)
}

fn replaced(text: &str, args: &[Value]) -> Result<String, Error> {
    let (old, new, count, kwargs): (&str, &str, Option<i64>, Kwargs) = from_args(args)?;
    let count = count.or(kwargs.get("count")?).unwrap_or(-1);
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    if new.len() > old.len() {
        let matches = if old.is_empty() { text.len() + 1 } else { text.matches(old).count() }.min(count);
        within_limit(text.len().saturating_add(matches.saturating_mul(new.len() - old.len())))?;
    }
    Ok(text.replacen(old, new, count))
}

fn within_limit(bytes: usize) -> Result<(), Error> {
    if bytes > METHOD_OUTPUT_BYTES_MAX {
        return Err(Error::new(ErrorKind::OutOfFuel, "a string method makes too long a string"));
    }
    Ok(())
}

fn joined(separator: &str, args: &[Value]) -> Result<String, Error> {
    let (items,): (&Value,) = from_args(args)?;
    let mut out = String::new();
    for (index, item) in items.try_iter()?.enumerate() {
        let Some(text) = item.as_str() else {
            return fail(format!("sequence item {index}: expected str instance, {} found", item.kind()));
        };
        if index > 0 {
            out.push_str(separator);
        }
        out.push_str(text);
        within_limit(out.len())?;
    }
    Ok(out)
}

/// Upper case after every character that has no case, lower case elsewhere.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside_word = false;
    for char in text.chars() {
        if inside_word {
            out.extend(char.to_lowercase());
        } else {
            out.extend(char.to_uppercase());
        }
        inside_word = char.is_lowercase() || char.is_uppercase();
    }
    out
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    let mut out: String = chars.next().into_iter().flat_map(char::to_uppercase).collect();
    out.push_str(&chars.as_str().to_lowercase());
    out
}

fn swapped_case(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_uppercase() {
            out.extend(char.to_lowercase());
        } else {
            out.extend(char.to_uppercase());
        }
    }
    out
}

fn partition(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return fail("empty separator");
    }
    let found = if method == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if method == "partition" => [text, "", ""],
        None => ["", "", text],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

/// `startswith(prefix or tuple of them[, start[, end]])` and its mirror.
fn has_affix(text: &str, method: &str, args: &[Value]) -> Result<bool, Error> {
    let (affix, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let text = slice_chars(text, start, end);
    let matches = |affix: &str| if method == "startswith" { text.starts_with(affix) } else { text.ends_with(affix) };
    if let Some(affix) = affix.as_str() {
        return Ok(matches(affix));
    }
    if !affix.is_tuple() {
        return fail(format!("{method} first arg must be str or a tuple of str, not {}", affix.kind()));
    }
    for affix in affix.try_iter()? {
        match affix.as_str() {
            Some(affix) if matches(affix) => return Ok(true),
            Some(_) => {}
            None => return fail(format!("tuple for {method} must only contain str, not {}", affix.kind())),
        }
    }
    Ok(false)
}

/// `text[start:end]` in characters, negative ends counted from the back.
fn slice_chars(text: &str, start: Option<i64>, end: Option<i64>) -> &str {
    if start.is_none() && end.is_none() {
        return text;
    }
    let count = text.chars().count() as i64;
    let place = |at: i64| if at < 0 { (count + at).max(0) } else { at.min(count) } as usize;
    let (start, end) = (place(start.unwrap_or(0)), place(end.unwrap_or(count)));
    let byte = |chars: usize| text.char_indices().nth(chars).map_or(text.len(), |(at, _)| at);
    if start >= end { "" } else { &text[byte(start)..byte(end)] }
}

/// Index of a substring in characters, -1 if it is not there.
fn position(text: &str, args: &[Value]) -> Result<i64, Error> {
    let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let part = slice_chars(text, start, end);
    let before_part = text[..part.as_ptr() as usize - text.as_ptr() as usize].chars().count();
    let inside = if part.is_empty() && !what.is_empty() { None } else { part.find(what) };
    Ok(inside.map_or(-1, |at| (before_part + part[..at].chars().count()) as i64))
}

fn padded(text: &str, method: &str, args: &[Value]) -> Result<String, Error> {
    let (width, fill): (i64, Option<&str>) = from_args(args)?;
    if fill.is_some_and(|fill| fill.chars().nth(1).is_some() || fill.is_empty()) {
        return fail("the fill character must be exactly one character long");
    }
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
    within_limit(text.len().saturating_add(missing.saturating_mul(4)))?;
    let fill = if method == "zfill" { "0" } else { fill.unwrap_or(" ") };
    let pad = |count: usize| fill.repeat(count);
    Ok(match method {
        "ljust" => format!("{text}{}", pad(missing)),
        "rjust" => format!("{}{text}", pad(missing)),
        "zfill" => match text.strip_prefix(['+', '-']) {
            Some(digits) => format!("{}{}{digits}", &text[..1], pad(missing)),
            None => format!("{}{text}", pad(missing)),
        },
        _ => {
            // CPython puts the odd one on the left when the width is odd.
            let left = missing / 2 + (missing & usize::try_from(width).unwrap_or(0) & 1);
            format!("{}{text}{}", pad(left), pad(missing - left))
        }
    })
}

fn map_method(map: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let Some(object) = map.as_object() else { return Ok(None) };
    Ok(match method {
        "get" => {
            let (key, default): (&Value, Option<Value>) = from_args(args)?;
            Some(object.get_value(key).or(default).unwrap_or_else(|| Value::from(())))
        }
        // Views print as dict_items(...) in Python; as lists they behave alike everywhere templates look.
        "items" => {
            let () = from_args(args)?;
            let pairs = object.try_iter_pairs().into_iter().flatten();
            Some(pairs.map(|(key, value)| Value::from(Tuple::from([key, value]))).collect())
        }
        "keys" => {
            let () = from_args(args)?;
            Some(object.try_iter_pairs().into_iter().flatten().map(|(key, _)| key).collect())
        }
        "values" => {
            let () = from_args(args)?;
            Some(object.try_iter_pairs().into_iter().flatten().map(|(_, value)| value).collect())
        }
        "copy" => Some(Value::from_pairs(object.try_iter_pairs().into_iter().flatten())),
        // The engines' sandbox refuses these on data of the request.
        "update" | "pop" | "popitem" | "setdefault" | "clear" => {
            return fail(format!("dict.{method} is not allowed in a sandboxed template"));
        }
        _ => None,
    })
}

fn list_method(list: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(match method {
        "count" => {
            let (what,): (&Value,) = from_args(args)?;
            Some(Value::from(list.try_iter()?.filter(|item| item == what).count()))
        }
        "index" => {
            let (what,): (&Value,) = from_args(args)?;
            match list.try_iter()?.position(|item| item == *what) {
                Some(at) => Some(Value::from(at)),
                None => return fail("value is not in list"),
            }
        }
        "copy" => Some(list.try_iter()?.collect()),
        "append" | "extend" | "insert" | "remove" | "pop" | "clear" | "sort" | "reverse" => {
            return fail(format!("list.{method} is not allowed in a sandboxed template"));
        }
        _ => None,
    })
}

/// `str(value)` for a filter's input: strings as they are, other values as Python prints them.
pub fn text_of(value: &Value) -> Result<std::borrow::Cow<'_, str>, Error> {
    match value.as_str() {
        Some(text) => Ok(text.into()),
        None => python::str(value).map(Into::into),
    }
}
