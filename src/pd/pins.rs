//! A client's wish for a data-parallel rank. A wish belongs to one leg: what pins decode never reaches the
//! prefill leg, and a rank that no worker of the leg's pool has is refused before anything is sent.

use super::splice::Members;

/// Why a pin is refused; the client's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    #[error("{name} is not a rank: {value}")]
    NotARank { name: &'static str, value: String },
    #[error("{name} asks for rank {rank}, but the {role} workers have ranks 0 to {last}")]
    OutOfRange { name: &'static str, rank: u32, role: &'static str, last: u32 },
    #[error("{first} and {second} ask for different ranks")]
    Contradiction { first: &'static str, second: &'static str },
}

/// One wish and where it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    pub name: &'static str,
    pub rank: u32,
}

/// Ranks asked for, per leg.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankPins {
    pub prefill: Option<Pin>,
    pub decode: Option<Pin>,
}

/// Body members by which clients of SGLang and vLLM name the rank that answers, i.e. the decode leg's.
pub(super) const DECODE_PINS: [&str; 3] = ["data_parallel_rank", "routed_dp_rank", "dp_rank"];
/// The member that names the rank with the prompt's KV.
pub(super) const PREFILL_PIN: &str = "disagg_prefill_dp_rank";
const HEADER: &str = "X-Data-Parallel-Rank";

impl RankPins {
    /// `header` is the client's `X-Data-Parallel-Rank`.
    pub fn of(members: &Members, header: Option<&[u8]>) -> Result<Self, PinError> {
        let mut decode = match header {
            Some(value) => Some(parse(HEADER, value)?),
            None => None,
        };
        for name in DECODE_PINS {
            let Some(found) = in_body(members, name)? else { continue };
            match decode {
                Some(Pin { name: first, rank }) if rank != found.rank => {
                    return Err(PinError::Contradiction { first, second: name });
                }
                _ => decode = Some(found),
            }
        }
        Ok(Self { prefill: in_body(members, PREFILL_PIN)?, decode })
    }

    /// Checks one pin against the most ranks that a worker of the pool has.
    pub fn check(pin: Option<Pin>, role: &'static str, ranks: u32) -> Result<(), PinError> {
        match pin {
            Some(Pin { name, rank }) if rank >= ranks => {
                Err(PinError::OutOfRange { name, rank, role, last: ranks.saturating_sub(1) })
            }
            _ => Ok(()),
        }
    }
}

fn in_body(members: &Members, name: &'static str) -> Result<Option<Pin>, PinError> {
    match members.raw(name) {
        None | Some(b"null") => Ok(None),
        Some(raw) => parse(name, raw).map(Some),
    }
}

fn parse(name: &'static str, value: &[u8]) -> Result<Pin, PinError> {
    let text = String::from_utf8_lossy(value.trim_ascii());
    // `str::parse` would take a plus sign.
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(rank) if is_number => Ok(Pin { name, rank }),
        _ => Err(PinError::NotARank { name, value: text.chars().take(40).collect() }),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn pins(body: &'static str, header: Option<&str>) -> Result<RankPins, String> {
        let members = Members::scan(&Bytes::from_static(body.as_bytes())).expect("an object");
        RankPins::of(&members, header.map(str::as_bytes)).map_err(|error| error.to_string())
    }

    #[test]
    fn pins_belong_to_one_leg() {
        let pin = |name, rank| Some(Pin { name, rank });
        assert_eq!(pins("{}", None), Ok(RankPins::default()));
        assert_eq!(pins(r#"{"dp_rank":3}"#, None), Ok(RankPins { prefill: None, decode: pin("dp_rank", 3) }));
        assert_eq!(pins("{}", Some(" 2 ")), Ok(RankPins { prefill: None, decode: pin(HEADER, 2) }));
        let both = pins(r#"{"disagg_prefill_dp_rank":1,"routed_dp_rank":0,"data_parallel_rank":null}"#, None);
        assert_eq!(both, Ok(RankPins { prefill: pin(PREFILL_PIN, 1), decode: pin("routed_dp_rank", 0) }));
        assert_eq!(pins(r#"{"dp_rank":-1}"#, None), Err("dp_rank is not a rank: -1".into()));
        assert_eq!(pins("{}", Some("+1")), Err(format!("{HEADER} is not a rank: +1")));
        assert!(pins(r#"{"dp_rank":1}"#, Some("2")).is_err());
    }

    #[test]
    fn a_rank_that_nobody_has_is_refused() {
        let pin = Some(Pin { name: "dp_rank", rank: 3 });
        assert_eq!(RankPins::check(pin, "decode", 4), Ok(()));
        let error = RankPins::check(pin, "decode", 2).expect_err("refused");
        assert_eq!(error.to_string(), "dp_rank asks for rank 3, but the decode workers have ranks 0 to 1");
        assert_eq!(RankPins::check(None, "decode", 0), Ok(()));
    }
}
