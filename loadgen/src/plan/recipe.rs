//! Owns the named recipes and their parameters. Never draws.

use serde::Serialize;

/// What kind of sessions. Lengths are drawn from log-normal distributions around the means told here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Shape {
    /// One of 32 system prompts of 2,000 tokens (Zipf 1.0), a question of 200, an answer of 150.
    SharedPrompts,
    /// A system prompt of 500 tokens, three of 400 documents of 1,500 tokens (Zipf 0.9) in the order of their rank, a
    /// question of 60, an answer of 250.
    Rag,
    /// Conversations of 6 turns: system prompts as above of 1,000 tokens, messages of 150, answers of 300, and 20 s to
    /// read and think.
    Chat,
    /// Agents of 24 calls: one of 8 prompts with tools of 10,000 tokens (Zipf 0.8), a task of 1,500; each call is
    /// answered by 150 tokens, then a tool runs for 3 s and appends 1,200.
    Agents,
    /// One system prompt of 500 tokens for all, a question of 60, an answer of 300.
    OnePrompt,
    /// Prompts of 3,000 tokens that nobody shares, answers of 200.
    Unique,
}

/// System prompts, one per session.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shared {
    /// Distinct ones; 1: the same for all.
    pub count: usize,
    /// Exponent of their popularity; 0: all alike.
    pub zipf: f64,
    pub tokens: usize,
}

/// Documents between system prompt and question, in the order of their rank. Retrievers that sort by a fixed key make
/// prefixes that can be shared; by score they hardly do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Documents {
    pub count: usize,
    pub zipf: f64,
    /// Draws per session; a document drawn twice stands once.
    pub per_session: usize,
    pub tokens: usize,
}

/// One picture per session.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Images {
    /// Pictures that come again: rounds over all of them, each round in an order of its own.
    pub count: usize,
    /// Length of a `data:` reference.
    pub bytes: usize,
    /// Share of sessions that show a picture which nobody else has, 0 to 1.
    pub new_share: f64,
}

/// What sessions are made of. Lengths and counts are means.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recipe {
    pub name: String,
    pub shared: Option<Shared>,
    /// The system prompt is in part definitions of tools, and what follows an answer is what the called tool gave.
    pub has_tools: bool,
    pub documents: Option<Documents>,
    pub images: Option<Images>,
    /// Tokens that the first message has before what every message has.
    pub task_tokens: f64,
    pub message_tokens: f64,
    pub answer_tokens: f64,
    pub turns: f64,
    /// Between an answer's end and the next turn, seconds.
    pub pause_s: f64,
    /// Standard deviation of the logarithm of lengths and pauses; where it is not 0, turns vary by half of their mean
    /// either way. 0: everything is its mean.
    pub spread: f64,
}

impl Recipe {
    /// Single requests of one message; everything else is added by `..`.
    pub fn plain(name: &str, message_tokens: f64, answer_tokens: f64) -> Recipe {
        Recipe {
            name: name.to_owned(),
            shared: None,
            has_tools: false,
            documents: None,
            images: None,
            task_tokens: 0.0,
            message_tokens,
            answer_tokens,
            turns: 1.0,
            pause_s: 0.0,
            spread: 0.0,
        }
    }

    /// Single requests with one of `count` system prompts, lengths as told.
    pub fn shared_prefix(
        count: usize,
        zipf: f64,
        tokens: usize,
        message_tokens: usize,
        answer_tokens: usize,
    ) -> Recipe {
        let plain = Recipe::plain("shared-prefix", message_tokens as f64, answer_tokens as f64);
        Recipe { shared: (tokens > 0).then_some(Shared { count, zipf, tokens }), ..plain }
    }
}

impl Shape {
    pub fn as_str(self) -> &'static str {
        match self {
            Shape::SharedPrompts => "shared-prompts",
            Shape::Rag => "rag",
            Shape::Chat => "chat",
            Shape::Agents => "agents",
            Shape::OnePrompt => "one-prompt",
            Shape::Unique => "unique",
        }
    }

    pub fn recipe(self) -> Recipe {
        let plain = |message_tokens, answer_tokens| Recipe {
            spread: 0.6,
            ..Recipe::plain(self.as_str(), message_tokens, answer_tokens)
        };
        let shared = |count, zipf, tokens| Some(Shared { count, zipf, tokens });
        match self {
            Shape::SharedPrompts => Recipe { shared: shared(32, 1.0, 2000), ..plain(200.0, 150.0) },
            Shape::Rag => Recipe {
                shared: shared(1, 0.0, 500),
                documents: Some(Documents { count: 400, zipf: 0.9, per_session: 3, tokens: 1500 }),
                ..plain(60.0, 250.0)
            },
            Shape::Chat => Recipe { shared: shared(32, 1.0, 1000), turns: 6.0, pause_s: 20.0, ..plain(150.0, 300.0) },
            Shape::Agents => Recipe {
                shared: shared(8, 0.8, 10_000),
                has_tools: true,
                task_tokens: 300.0,
                turns: 24.0,
                pause_s: 3.0,
                ..plain(1200.0, 150.0)
            },
            Shape::OnePrompt => Recipe { shared: shared(1, 0.0, 500), ..plain(60.0, 300.0) },
            Shape::Unique => plain(3000.0, 200.0),
        }
    }
}
