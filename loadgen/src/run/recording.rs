//! Owns recorded requests: JSON lines with `body`, `time` (seconds since any moment) and, where it is not the chat
//! endpoint, `path`. Bodies stay the bytes that they are. Never sends.

use std::io::BufRead;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::value::RawValue;

/// Where a recorded request goes that tells no path.
pub const CHAT_PATH: &str = "/v1/chat/completions";

/// One recorded request.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// Nanoseconds after the first of the recording.
    pub at_ns: u64,
    pub path: Arc<str>,
    /// The body as it stands in the line, blanks and order of members included.
    pub body: Arc<str>,
}

#[derive(Deserialize)]
struct Line<'a> {
    time: f64,
    #[serde(borrow)]
    body: &'a RawValue,
    #[serde(default)]
    path: Option<String>,
}

/// The requests in order of time; at most `requests_max`. Empty lines are passed over.
pub fn read_recording(reader: impl BufRead, requests_max: usize) -> Result<Vec<Recorded>> {
    let mut timed = Vec::new();
    for (number, line) in reader.lines().enumerate() {
        let line = line.with_context(|| format!("line {}", number + 1))?;
        if timed.len() >= requests_max || line.trim().is_empty() {
            continue;
        }
        let Line { time, body, path } = serde_json::from_str(&line)
            .with_context(|| format!("line {}: `time` and `body` are needed", number + 1))?;
        ensure!(time.is_finite(), "line {}: {time} is no time", number + 1);
        let path = path.unwrap_or_else(|| CHAT_PATH.into());
        let is_path = path.starts_with('/') && path.bytes().all(|byte| byte.is_ascii_graphic());
        ensure!(is_path, "line {}: {path:?} is no path", number + 1);
        timed.push((time, Recorded { at_ns: 0, path: path.into(), body: body.get().into() }));
    }
    timed.sort_by(|(left, _), (right, _)| left.total_cmp(right));
    let first = timed.first().context("the recording is empty")?.0;
    let place = |(time, recorded)| Recorded { at_ns: ((time - first) * 1e9) as u64, ..recorded };
    Ok(timed.into_iter().map(place).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_keep_their_bytes_and_lines_are_ordered_by_time() {
        let text = "{\"time\": 1700000002.5, \"body\": {\"b\" :1.50,  \"a\":\"\\u00e9\"}}\n\n\
                    {\"body\":[ 1 ],\"time\":1700000002.25,\"path\":\"/v1/embeddings\",\"more\":0}\n";
        let recorded = read_recording(text.as_bytes(), 9).unwrap();
        assert_eq!((&*recorded[0].path, &*recorded[0].body, recorded[0].at_ns), ("/v1/embeddings", "[ 1 ]", 0));
        assert_eq!((&*recorded[1].path, &*recorded[1].body), (CHAT_PATH, "{\"b\" :1.50,  \"a\":\"\\u00e9\"}"));
        assert_eq!(recorded[1].at_ns, 250_000_000);
        assert_eq!(read_recording(text.as_bytes(), 1).unwrap().len(), 1);
    }

    #[test]
    fn lines_that_cannot_be_sent_are_named() {
        let read = |text: &str| format!("{:#}", read_recording(text.as_bytes(), 9).unwrap_err());
        assert!(read("").contains("empty"));
        assert!(read("{\"time\":0,\"body\":{}}\n{\"time\":1}").contains("line 2: `time` and `body` are needed"));
        assert!(read("{\"time\":0,\"body\":{}, \"path\":\"x\"}").contains("\"x\" is no path"));
        assert!(read("{\"time\":0,\"body\":{}, \"path\":\"/a b\\r\\n\"}").contains("is no path"));
    }
}
