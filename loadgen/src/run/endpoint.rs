//! Owns the endpoints that generated requests can go to. Never writes a body.

use serde::Serialize;

use super::recording::CHAT_PATH;

/// Where generated requests and those of a trace go; recorded ones have paths of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    #[default]
    Chat,
    /// `/v1/responses`: the same messages, and what tools say is a user's.
    Responses,
    /// `/v1/messages`: the same, and the system prompt stands apart.
    Messages,
    /// `/v1/completions`: the conversation so far as one text, a line for each message; what tools say is words of it.
    Completions,
    /// `/v1/embeddings`: the same text without answers, since nothing is generated.
    Embeddings,
}

impl Endpoint {
    pub fn path(self) -> &'static str {
        match self {
            Endpoint::Chat => CHAT_PATH,
            Endpoint::Responses => "/v1/responses",
            Endpoint::Messages => "/v1/messages",
            Endpoint::Completions => "/v1/completions",
            Endpoint::Embeddings => "/v1/embeddings",
        }
    }

    /// Whether it takes a text in place of messages.
    pub fn takes_text(self) -> bool {
        matches!(self, Endpoint::Completions | Endpoint::Embeddings)
    }

    /// Whether what it answers is words.
    pub fn generates(self) -> bool {
        self != Endpoint::Embeddings
    }
}
