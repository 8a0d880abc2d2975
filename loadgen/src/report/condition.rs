//! Owns `--assert`: a condition on one number of a report, `ttft.p99<200ms`. Never decides what is reported.
//!
//! A name is a path of members. A member's unit may be left out (`ttft` for `ttft_ms`); it says what a bound without a
//! unit means. Lists are no numbers and cannot be named.

use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Members that count by names which need not be there; what is not there is 0.
const OPEN_COUNTS: &str = "errors_by_class";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    Less,
    AtMost,
    More,
    AtLeast,
    Equal,
    Unequal,
}

/// The longer spellings first: each is looked for at the same place.
const COMPARISONS: [(&str, Comparison); 7] = [
    ("<=", Comparison::AtMost),
    (">=", Comparison::AtLeast),
    ("==", Comparison::Equal),
    ("!=", Comparison::Unequal),
    ("<", Comparison::Less),
    (">", Comparison::More),
    ("=", Comparison::Equal),
];

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Milliseconds,
    Seconds,
    Percent,
    Plain,
}

/// Suffixes of bounds, and how many of the base (seconds, parts of one) one is. The longer ones first.
const UNITS: [(&str, Unit, f64); 5] = [
    ("us", Unit::Milliseconds, 1e-6),
    ("µs", Unit::Milliseconds, 1e-6),
    ("ms", Unit::Milliseconds, 1e-3),
    ("s", Unit::Seconds, 1.0),
    ("%", Unit::Percent, 0.01),
];

/// Ends of members' names that say their unit, and how many of the base one is.
const MEMBER_UNITS: [(&str, Unit, f64); 3] =
    [("_ms", Unit::Milliseconds, 1e-3), ("_seconds", Unit::Seconds, 1.0), ("_rps", Unit::Plain, 1.0)];

/// Members that are shares of one: a bound in percent fits.
const SHARE_ENDS: [&str; 4] = ["_rate", "_share", "concentration", "attainment"];

/// One condition.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    /// As it was given.
    text: String,
    path: Vec<String>,
    comparison: Comparison,
    bound: f64,
    unit: Unit,
    /// The bound's unit in the base.
    scale: f64,
}

impl FromStr for Condition {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Condition> {
        let expected = "expected NAME, one of < <= > >= = !=, and a number with ms, s, % or no unit: ttft.p99<200ms";
        let at = text.find(['<', '>', '=', '!']).with_context(|| format!("{text:?}: {expected}"))?;
        let (name, rest) = text.split_at(at);
        let found = COMPARISONS.iter().find_map(|(sign, comparison)| Some((*comparison, rest.strip_prefix(sign)?)));
        let (comparison, bound) = found.with_context(|| format!("{text:?}: {expected}"))?;
        let (name, bound) = (name.trim(), bound.trim());
        let path: Vec<String> = name.split('.').map(str::to_owned).collect();
        ensure!(path.iter().all(|member| !member.is_empty()), "{text:?}: {expected}");
        let (number, unit, scale) = match bound {
            "true" => ("1", Unit::Plain, 1.0),
            "false" => ("0", Unit::Plain, 1.0),
            _ => UNITS
                .iter()
                .find_map(|(suffix, unit, scale)| Some((bound.strip_suffix(suffix)?.trim_end(), *unit, *scale)))
                .unwrap_or((bound, Unit::Plain, 1.0)),
        };
        let bound = number.parse::<f64>().ok().filter(|bound| bound.is_finite());
        let bound = bound.with_context(|| format!("{text:?}: {number:?} is no number; {expected}"))?;
        Ok(Condition { text: text.to_owned(), path, comparison, bound, unit, scale })
    }
}

/// What a name means in a document.
struct Found<'a> {
    /// Members as they are spelt there.
    path: Vec<&'a str>,
    value: &'a Value,
}

impl Condition {
    /// Whether `document` keeps it; if not, the line that says what was found.
    ///
    /// # Errors
    /// A name that the document has not, with those it has; a unit that does not fit.
    pub fn check(&self, document: &Value) -> Result<Result<(), String>> {
        let zero = Value::from(0);
        let found = self.find(document, &zero)?;
        let member = found.path.join(".");
        let (unit, base) = unit_of(&found.path);
        let is_share = SHARE_ENDS.iter().any(|end| found.path.last().is_some_and(|last| last.ends_with(end)));
        let fits = match self.unit {
            Unit::Plain => true,
            Unit::Percent => is_share,
            Unit::Milliseconds | Unit::Seconds => matches!(unit, Unit::Milliseconds | Unit::Seconds),
        };
        ensure!(fits, "{:?}: {member} is {}", self.text, describe(unit, is_share));
        let value = match found.value {
            Value::Bool(value) => f64::from(u8::from(*value)),
            Value::Null => return Ok(Err(format!("{}: {member} was not reported", self.text))),
            value => value.as_f64().with_context(|| format!("{:?}: {member} is no number", self.text))?,
        };
        // In the member's own unit, so that a bound of 200 is compared as it was written.
        let bound = match self.unit {
            Unit::Plain => self.bound,
            // Back to what was meant: 0.3s are 300 ms and not a little more.
            _ => (self.bound * self.scale / base * 1e9).round() / 1e9,
        };
        let holds = match self.comparison {
            Comparison::Less => value < bound,
            Comparison::AtMost => value <= bound,
            Comparison::More => value > bound,
            Comparison::AtLeast => value >= bound,
            Comparison::Equal => value == bound,
            Comparison::Unequal => value != bound,
        };
        let shown = |number: f64| match unit {
            _ if found.value.is_boolean() => (number != 0.0).to_string(),
            Unit::Milliseconds => format!("{} ms", rounded(number)),
            Unit::Seconds => format!("{} s", rounded(number)),
            _ if is_share => format!("{} %", rounded(number * 100.0)),
            _ => rounded(number),
        };
        Ok(if holds {
            Ok(())
        } else {
            Err(format!("{}: {member} is {}, bound {}", self.text, shown(value), shown(bound)))
        })
    }

    fn find<'a>(&'a self, document: &'a Value, zero: &'a Value) -> Result<Found<'a>> {
        let (mut value, mut path) = (document, Vec::new());
        for member in &self.path {
            if path == [OPEN_COUNTS] && value.get(member).is_none() {
                (value, path) = (zero, vec![OPEN_COUNTS, member]);
                continue;
            }
            if value.is_null() && !path.is_empty() {
                // A part of the report that this run has not.
                path.push(member);
                continue;
            }
            let Some((spelt, next)) = value.as_object().and_then(|members| {
                let units = MEMBER_UNITS.iter().map(|(end, ..)| *end);
                [""].into_iter().chain(units).find_map(|end| members.get_key_value(&format!("{member}{end}")))
            }) else {
                return Err(self.unknown(document));
            };
            path.push(spelt.as_str());
            value = next;
        }
        if value.is_object() || value.is_array() || value.is_string() {
            return Err(self.unknown(document));
        }
        Ok(Found { path, value })
    }

    fn unknown(&self, document: &Value) -> anyhow::Error {
        let mut known = Vec::new();
        names(document, "", &mut known);
        anyhow::anyhow!("{:?}: nothing is called {:?}; known: {}", self.text, self.path.join("."), known.join(" "))
    }
}

/// All conditions against one document: the lines of those that it does not keep.
///
/// # Errors
/// As [`Condition::check`].
pub fn broken(conditions: &[Condition], document: &Value) -> Result<Vec<String>> {
    let mut broken = Vec::new();
    for condition in conditions {
        if let Err(line) = condition.check(document)? {
            broken.push(line);
        }
    }
    Ok(broken)
}

/// Refuses before a run what could only fail behind it.
///
/// # Errors
/// As [`Condition::check`].
pub fn ensure_known(conditions: &[Condition], template: &Value) -> Result<()> {
    broken(conditions, template).map(drop)
}

fn unit_of(path: &[&str]) -> (Unit, f64) {
    // The innermost member that says one: `ttft_ms.p99` is in milliseconds, `ttft_ms.count` a count.
    if path.last() == Some(&"count") {
        return (Unit::Plain, 1.0);
    }
    let of_member = |member: &&str| MEMBER_UNITS.iter().find(|(end, ..)| member.ends_with(end));
    path.iter().rev().find_map(of_member).map_or((Unit::Plain, 1.0), |(_, unit, base)| (*unit, *base))
}

fn describe(unit: Unit, is_share: bool) -> &'static str {
    match unit {
        Unit::Milliseconds => "in milliseconds",
        Unit::Seconds => "in seconds",
        _ if is_share => "a share (0 to 1, or percent)",
        _ => "a plain number",
    }
}

fn rounded(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Paths of all numbers, without units where [`Condition`] does not need them.
fn names(value: &Value, prefix: &str, out: &mut Vec<String>) {
    for (member, value) in value.as_object().into_iter().flatten() {
        let short = MEMBER_UNITS.iter().find_map(|(end, ..)| member.strip_suffix(end)).unwrap_or(member);
        let path = if prefix.is_empty() { short.to_owned() } else { format!("{prefix}.{short}") };
        match value {
            Value::Object(_) if member == OPEN_COUNTS => out.push(format!("{path}.CLASS")),
            Value::Object(_) => names(value, &path, out),
            Value::Array(_) | Value::String(_) => {}
            _ => out.push(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn document() -> Value {
        json!({"requests": 100, "errors": 2, "errors_by_class": {"http_503": 2}, "error_rate": 0.02, "hit_rate": null,
            "ttft_ms": {"count": 98, "p99": 180.5, "buckets": [[1.0, 2]]}, "duration_seconds": 12.5,
            "throughput_rps": 7.5, "generator": {"saturated": false, "cpu_share": 0.4}, "target": "http://x",
            "workload": {"kind": "unique"}})
    }

    #[track_caller]
    fn check(condition: &str, expected: Result<(), &str>) {
        let outcome = condition.parse::<Condition>().unwrap().check(&document()).unwrap();
        assert_eq!(outcome.as_ref().map(drop).map_err(String::as_str), expected, "{condition}");
    }

    #[test]
    fn bounds_have_units() {
        check("ttft.p99<200ms", Ok(()));
        check("ttft_ms.p99 <= 0.2s", Ok(()));
        check("ttft.p99<180500us", Err("ttft.p99<180500us: ttft_ms.p99 is 180.5 ms, bound 180.5 ms"));
        check("ttft.p99<=180500µs", Ok(()));
        check("ttft.p99<100", Err("ttft.p99<100: ttft_ms.p99 is 180.5 ms, bound 100 ms"));
        check("ttft.count>=98", Ok(()));
        check("duration<13s", Ok(()));
        check("duration<12000ms", Err("duration<12000ms: duration_seconds is 12.5 s, bound 12 s"));
        check("error_rate<1%", Err("error_rate<1%: error_rate is 2 %, bound 1 %"));
        check("generator.cpu_share<50 %", Ok(()));
        check("throughput>7", Ok(()));
        check("throughput_rps!=7.5", Err("throughput_rps!=7.5: throughput_rps is 7.5, bound 7.5"));
        check("generator.saturated=false", Ok(()));
        check("generator.saturated==true", Err("generator.saturated==true: generator.saturated is false, bound true"));
    }

    #[test]
    fn what_was_not_reported_holds_nothing_and_absent_classes_are_zero() {
        check("hit_rate>0", Err("hit_rate>0: hit_rate was not reported"));
        check("errors_by_class.timeout=0", Ok(()));
        check("errors_by_class.http_503<2", Err("errors_by_class.http_503<2: errors_by_class.http_503 is 2, bound 2"));
    }

    #[test]
    fn unknown_names_come_with_the_known_ones() {
        for condition in ["tfft.p99<1", "ttft<1", "ttft.buckets<1", "target=1", "ttft.p99.x<1", "errors_by_class=0"] {
            let condition: Condition = condition.parse().unwrap();
            let error = condition.check(&document()).unwrap_err().to_string();
            for known in ["ttft.p99", "errors_by_class.CLASS", "duration", "generator.saturated", "throughput"] {
                assert!(error.contains(known), "{error}");
            }
            assert!(!error.contains("buckets ") && !error.contains("workload"), "{error}");
        }
    }

    #[test]
    fn units_that_do_not_fit_are_refused() {
        for (condition, expected) in [
            ("errors<1%", "errors is a plain number"),
            ("ttft.p99<5%", "ttft_ms.p99 is in milliseconds"),
            ("ttft.count<5ms", "ttft_ms.count is a plain number"),
            ("error_rate<5ms", "error_rate is a share"),
        ] {
            let error = condition.parse::<Condition>().unwrap().check(&document()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn what_is_no_condition_is_refused() {
        for text in ["", "ttft.p99", "ttft.p99<", "ttft.p99<fast", "<5", "ttft..p99<5", "ttft.p99<5kg", "a!5", "a<nan"]
        {
            assert!(text.parse::<Condition>().is_err(), "{text}");
        }
    }
}
