//! The OpenAI-shaped surface: which path is which endpoint, the shape of errors, the lists of models and
//! workers. Pure functions from state to answers; never opens a socket.

mod error;
mod lists;
mod paths;

pub use error::{ApiError, from_rejection, json_response, stream_error_event};
pub use lists::{breaker, model, models, state, workers};
pub use paths::{Endpoint, endpoint, query_parameter};
