//! Why a request has no blocks: a closed set, one label each. Never an error to the client: the request is
//! routed by load and the engine answers it.

use std::fmt;

/// Why no prompt was produced for a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoBlocks {
    /// The router was started without a tokenizer and the prompt is text.
    NoTokenizer,
    /// The body is not JSON as Python reads it, or a member has a type no engine accepts.
    BadJson,
    /// Neither `messages` nor a usable `prompt`.
    NoPrompt,
    /// Image, audio or video parts: the engine expands them to tokens the router cannot know.
    Multimodal,
    /// A chat request, and the model's files hold no template.
    NoTemplate,
    /// The template itself refused the conversation (`raise_exception`); the text is the template's own.
    TemplateRefused(String),
    /// The template failed here, or used something that cannot be reproduced here.
    TemplateFailed(String),
    /// The request names something the router does not model; the text says what.
    Unsupported(&'static str),
    /// Over the limits on rendered bytes, template fuel or nesting.
    TooLong,
    /// The tokenizer failed on the text.
    EncodeFailed,
    /// The encoder pool was full or late.
    Busy,
}

impl NoBlocks {
    /// Label of the counter of refusals: a closed set, never text of a request or a template.
    pub fn reason(&self) -> &'static str {
        match self {
            NoBlocks::NoTokenizer => "no_tokenizer",
            NoBlocks::BadJson => "bad_json",
            NoBlocks::NoPrompt => "no_prompt",
            NoBlocks::Multimodal => "multimodal",
            NoBlocks::NoTemplate => "no_template",
            NoBlocks::TemplateRefused(_) => "template_refused",
            NoBlocks::TemplateFailed(_) => "template_failed",
            NoBlocks::Unsupported(_) => "unsupported",
            NoBlocks::TooLong => "too_long",
            NoBlocks::EncodeFailed => "encode_failed",
            NoBlocks::Busy => "busy",
        }
    }

    /// Every label `reason` can give, for a metric that shows all of them from the start.
    pub const REASONS: [&'static str; 11] = [
        "no_tokenizer",
        "bad_json",
        "no_prompt",
        "multimodal",
        "no_template",
        "template_refused",
        "template_failed",
        "unsupported",
        "too_long",
        "encode_failed",
        "busy",
    ];
}

impl fmt::Display for NoBlocks {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoBlocks::TemplateRefused(text) | NoBlocks::TemplateFailed(text) => {
                write!(formatter, "{}: {text}", self.reason())
            }
            NoBlocks::Unsupported(what) => write!(formatter, "{}: {what}", self.reason()),
            _ => formatter.write_str(self.reason()),
        }
    }
}

impl std::error::Error for NoBlocks {}
