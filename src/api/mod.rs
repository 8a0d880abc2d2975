//! The surface: which path is which endpoint, the shape of errors, the lists of models and workers, and Anthropic's form
//! beside OpenAI's. Pure functions from state to answers; never opens a socket.

mod error;
mod lists;
pub mod messages;
mod paths;

pub use error::{ApiError, from_rejection, json_bytes, json_response, stream_error_event};
pub use lists::{breaker, model, models, state, workers};
pub use paths::{Endpoint, endpoint, query_parameter};
