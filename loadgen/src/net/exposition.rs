//! Owns the reading of a metrics page in Prometheus' text format. Never fetches one.

use std::borrow::Cow;

/// One value of a page.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample<'a> {
    pub name: &'a str,
    labels: &'a str,
    pub value: f64,
}

impl Sample<'_> {
    /// Value of a label, unescaped.
    pub fn label(&self, name: &str) -> Option<Cow<'_, str>> {
        let mut rest = self.labels;
        loop {
            let (found, quoted) = rest.split_once("=\"")?;
            let end = end_of_quoted(quoted)?;
            if found.trim_matches([',', ' ']) == name {
                return Some(unescaped(&quoted[..end]));
            }
            rest = &quoted[end + 1..];
        }
    }
}

/// All samples; lines that are none are passed over.
pub fn samples(page: &str) -> impl Iterator<Item = Sample<'_>> {
    page.lines().filter(|line| !line.starts_with('#')).filter_map(sample)
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let name_end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(name_end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => {
            let end = end_of_labels(inside)?;
            (&inside[..end], &inside[end + 1..])
        }
        None => ("", rest),
    };
    // A time may follow the value.
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Sample { name, labels, value })
}

/// Where the closing brace stands; values may hold braces.
fn end_of_labels(inside: &str) -> Option<usize> {
    let mut at = 0;
    loop {
        at += inside[at..].find(['"', '}'])?;
        if inside[at..].starts_with('}') {
            return Some(at);
        }
        at += 1 + end_of_quoted(&inside[at + 1..])? + 1;
    }
}

/// Where the closing quote of a value stands.
fn end_of_quoted(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends
    })
}

fn unescaped(text: &str) -> Cow<'_, str> {
    if !text.contains('\\') {
        return Cow::Borrowed(text);
    }
    let (mut out, mut letters) = (String::with_capacity(text.len()), text.chars());
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => match letters.next() {
                Some('n') => out.push('\n'),
                Some(other) => out.push(other),
                None => out.push('\\'),
            },
            letter => out.push(letter),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_with_their_labels() {
        let page = "# TYPE a counter\na_total{target=\"h:1#dp0\",role=\"mixed\"} 2\nb 1.5 1700000000\n\nc{} NaN\n\
                    d{x=\"a\\\"b}\\\\\",y=\"\\n\",} +Inf\nbroken{x=\"\nalso broken\n";
        let found: Vec<Sample> = samples(page).collect();
        let names: Vec<(&str, f64)> = found.iter().map(|sample| (sample.name, sample.value)).collect();
        assert_eq!(
            (names.len(), names[0], names[1], names[3]),
            (4, ("a_total", 2.0), ("b", 1.5), ("d", f64::INFINITY))
        );
        assert_eq!(found[0].label("target").as_deref(), Some("h:1#dp0"));
        assert_eq!(found[0].label("role").as_deref(), Some("mixed"));
        assert_eq!((found[0].label("rol"), found[1].label("x")), (None, None));
        assert_eq!(found[3].label("x").as_deref(), Some("a\"b}\\"));
        assert_eq!(found[3].label("y").as_deref(), Some("\n"));
    }
}
