//! Owns service level objectives: what is asked of one answer, and whether it met it. Never aggregates.

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use super::record::Exchange;

/// Limits that an answer must all meet; `ttft=200ms,itl=30ms,e2e=5s`, any of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Slo {
    /// From the intended send to the first token.
    #[serde(rename = "ttft_ms", serialize_with = "as_milliseconds")]
    pub ttft: Option<Duration>,
    /// Mean time between an answer's tokens.
    #[serde(rename = "itl_ms", serialize_with = "as_milliseconds")]
    pub itl: Option<Duration>,
    /// From the intended send to the last byte.
    #[serde(rename = "e2e_ms", serialize_with = "as_milliseconds")]
    pub e2e: Option<Duration>,
}

fn as_milliseconds<S: serde::Serializer>(limit: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    limit.map(|limit| limit.as_secs_f64() * 1000.0).serialize(serializer)
}

impl FromStr for Slo {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Slo> {
        let mut slo = Slo::default();
        for part in text.split(',') {
            let (name, limit) = part.split_once('=').with_context(|| format!("{part:?} is not NAME=TIME"))?;
            let place = match name.trim() {
                "ttft" => &mut slo.ttft,
                "itl" => &mut slo.itl,
                "e2e" => &mut slo.e2e,
                other => bail!("{other:?} is none of ttft, itl, e2e"),
            };
            ensure!(place.replace(parse_duration(limit)?).is_none(), "{} is told twice", name.trim());
        }
        Ok(slo)
    }
}

impl Slo {
    /// Whether a whole answer met every limit. One without a first token (not streamed) is judged by its end.
    pub fn is_met(&self, exchange: &Exchange) -> bool {
        let end_to_end = exchange.ended.saturating_duration_since(exchange.intended);
        let ttft =
            exchange.first_content.map_or(end_to_end, |first| first.saturating_duration_since(exchange.intended));
        let tokens = exchange.usage.map_or(exchange.content_events, |usage| usage.completion_tokens);
        let streaming: Duration = exchange.gaps.iter().sum();
        let itl = streaming.div_f64(tokens.saturating_sub(1).max(1) as f64);
        let within = |limit: Option<Duration>, found: Duration| limit.is_none_or(|limit| found <= limit);
        within(self.ttft, ttft) && within(self.itl, itl) && within(self.e2e, end_to_end)
    }
}

/// A time with its unit: `200ms`, `1.5s`, `30us`, `2m`.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let text = text.trim();
    let digits = text.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(text.len());
    let seconds_per_unit = match &text[digits..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        _ => bail!("{text:?} needs a number and a unit: us, ms, s or m"),
    };
    let number: f64 = text[..digits].trim().parse().with_context(|| format!("{text:?} is no time"))?;
    Duration::try_from_secs_f64(number * seconds_per_unit).with_context(|| format!("{text:?} is no time"))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn limits_are_read_with_their_units() {
        let slo: Slo = "ttft=200ms, itl=1500us".parse().unwrap();
        let (ttft, itl) = (Some(Duration::from_millis(200)), Some(Duration::from_micros(1500)));
        assert_eq!(slo, Slo { ttft, itl, e2e: None });
        assert_eq!("e2e=1.5s".parse::<Slo>().unwrap().e2e, Some(Duration::from_millis(1500)));
        let shown = serde_json::to_value(slo).unwrap();
        assert_eq!(shown, serde_json::json!({"ttft_ms": 200.0, "itl_ms": 1.5, "e2e_ms": null}));
        for wrong in ["", "ttft", "ttft=5", "ttft=-5ms", "ttft=xms", "speed=5ms", "itl=5ms,itl=6ms", "ttft=1h"] {
            assert!(wrong.parse::<Slo>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn every_limit_counts_from_the_intended_send() {
        let ms = Duration::from_millis;
        let intended = Instant::now();
        let exchange = Exchange {
            intended,
            sent: intended + ms(50),
            first_content: Some(intended + ms(100)),
            ended: intended + ms(190),
            gaps: vec![ms(30); 3],
            content_events: 10,
            ..Exchange::new(0, intended)
        };
        let met = |slo: &str| slo.parse::<Slo>().unwrap().is_met(&exchange);
        assert!(met("ttft=100ms") && !met("ttft=99ms"), "50 ms of waiting count");
        assert!(met("itl=10ms") && !met("itl=9ms"), "several tokens in one read share its gap");
        assert!(met("e2e=190ms") && !met("e2e=189ms"));
        assert!(!met("ttft=1s,itl=9ms,e2e=1s"), "one miss is a miss");
        let whole = Exchange { first_content: None, gaps: Vec::new(), content_events: 1, ..exchange.clone() };
        assert!("ttft=190ms,itl=0ms".parse::<Slo>().unwrap().is_met(&whole));
        assert!(!"ttft=189ms".parse::<Slo>().unwrap().is_met(&whole));
    }
}
