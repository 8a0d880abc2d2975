//! Message framing: which frame of a multipart message is what. Live messages are `[topic, sequence, payload]` or
//! `[topic, payload]`; replay answers, as a DEALER sees them, are `["", sequence, payload]` or, since the topic was added,
//! `["", topic, sequence, payload]`, ended by a sequence of all ones. Never looks into a payload.

use std::ops::Deref;

use super::BatchError;

/// Sequence that ends a replay (vLLM's `END_SEQ`: -1 as 8 bytes).
const END_OF_REPLAY: u64 = u64::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Live<'a> {
    pub topic: &'a [u8],
    /// Absent in two-frame messages; those are applied in order of arrival.
    pub sequence: Option<u64>,
    pub payload: &'a [u8],
}

/// Takes a live message apart. A sequence frame of another width than 8 bytes is refused: a batch that cannot be placed
/// in order would leave the mirror half-trusted.
pub fn live<'a, F: Deref<Target = [u8]>>(frames: &'a [F]) -> Result<Live<'a>, BatchError> {
    match frames {
        [topic, payload] => Ok(Live { topic, sequence: None, payload }),
        [topic, sequence, payload] => Ok(Live { topic, sequence: Some(sequence_number(sequence)?), payload }),
        _ => Err(BatchError::FrameCount(frames.len())),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replay<'a> {
    Batch { sequence: u64, payload: &'a [u8] },
    End,
}

/// Takes one answer of the replay socket apart, delimiter frame included.
pub fn replay<'a, F: Deref<Target = [u8]>>(frames: &'a [F]) -> Result<Replay<'a>, BatchError> {
    let (sequence, payload) = match frames {
        [delimiter, sequence, payload] | [delimiter, _, sequence, payload] if delimiter.is_empty() => {
            (sequence_number(sequence)?, payload)
        }
        _ => return Err(BatchError::FrameCount(frames.len())),
    };
    if sequence == END_OF_REPLAY { Ok(Replay::End) } else { Ok(Replay::Batch { sequence, payload }) }
}

/// Frames of a replay request for everything from `start` on, as a DEALER sends it.
pub fn replay_request(start: u64) -> [Vec<u8>; 2] {
    [Vec::new(), start.to_be_bytes().to_vec()]
}

fn sequence_number(frame: &[u8]) -> Result<u64, BatchError> {
    frame.try_into().map(u64::from_be_bytes).map_err(|_| BatchError::SequenceFrame(frame.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_forms() {
        let seven = 7u64.to_be_bytes();
        let frames: [&[u8]; 3] = [b"any topic", &seven, b"p"];
        assert_eq!(live(&frames), Ok(Live { topic: b"any topic", sequence: Some(7), payload: b"p" }));
        assert_eq!(live(&frames[..2]).map(|live| live.sequence), Ok(None));
        assert_eq!(live(&frames[..1]), Err(BatchError::FrameCount(1)));
        assert_eq!(live(&[&b"t"[..], &[0; 4], b"p"]), Err(BatchError::SequenceFrame(4)));
    }

    #[test]
    fn replay_forms() {
        let seven = 7u64.to_be_bytes();
        let end = u64::MAX.to_be_bytes();
        let batch = Ok(Replay::Batch { sequence: 7, payload: b"p" });
        assert_eq!(replay(&[&b""[..], &seven, b"p"]), batch);
        assert_eq!(replay(&[&b""[..], b"topic", &seven, b"p"]), batch);
        assert_eq!(replay(&[&b""[..], &end, b""]), Ok(Replay::End));
        assert_eq!(replay(&[&b""[..], b"", &end, b""]), Ok(Replay::End));
        assert_eq!(replay(&[&b"x"[..], &seven, b"p"]), Err(BatchError::FrameCount(3)));
    }
}
