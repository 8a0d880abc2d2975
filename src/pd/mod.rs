//! Prefill/decode disaggregation as pure code: the six protocols, the bodies and headers of both legs, fresh
//! transfer ids, and the end of a stream as an engine means it. Never does IO and never picks a worker.

mod completion;
mod handoff;
mod ids;
mod legs;
mod peer;
mod pins;
mod protocol;
mod splice;

pub use completion::{Completion, StreamFailure};
pub use handoff::{Handoff, HandoffError};
pub use ids::{AttemptIds, RequestIds};
pub use legs::{Leg, Pair, decode_leg, prefill_leg, release_leg};
pub use peer::{Peer, PeerError};
pub use pins::{Pin, PinError, RankPins};
pub use protocol::{PdEndpoint, Protocol, Schedule, Sequences};
pub use splice::{Edits, Members, SpliceError};
