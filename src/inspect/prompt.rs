//! `inspect prompt`: bodies as JSON lines in, what the router makes of each as JSON lines out.
//!
//! Runs the very code of the request path on every body; never talks to a worker.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Context;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::prompt::{EncoderChoice, Endpoint, EngineRules, Prompt, Prompter, PrompterOptions};

/// Arguments of `infera-router inspect prompt`.
#[derive(Debug, clap::Args)]
pub struct PromptArgs {
    /// Directory with tokenizer.json and its companions, or the file itself.
    #[arg(long, alias = "kv-tokenizer-path", env = "INFERA_ROUTER_TOKENIZER_PATH")]
    pub router_tokenizer_path: PathBuf,
    /// Engine whose message rules apply: vllm or sglang.
    #[arg(long, default_value = "vllm", value_parser = ["vllm", "sglang", "atom"])]
    pub engine: String,
    /// Tokens per block.
    #[arg(long, default_value_t = 16)]
    pub block_size: usize,
    /// Let a body bring its own `chat_template`.
    #[arg(long)]
    pub allow_request_chat_template: bool,
    /// JSON object of template arguments that the engines add to every request.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    pub kv_default_chat_template_kwargs: String,
    /// Time that templates see, RFC 3339 (default: now).
    #[arg(long, value_name = "TIME")]
    pub now: Option<String>,
    /// Encode with the reference tokenizer only.
    #[arg(long)]
    pub reference_encoder: bool,
}

/// Either a bare body or one with an id beside it.
#[derive(serde::Deserialize)]
struct Line<'a> {
    id: Option<serde_json::Value>,
    #[serde(borrow)]
    body: Option<&'a RawValue>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Answer {
    Prompt {
        id: Option<serde_json::Value>,
        /// `template`, or the encoder in code that rendered a chat; absent for other prompts.
        #[serde(skip_serializing_if = "Option::is_none")]
        renderer: Option<&'static str>,
        text: Option<String>,
        ids: Vec<u32>,
        blocks: Vec<String>,
    },
    Refused {
        id: Option<serde_json::Value>,
        error: String,
    },
}

/// Reads stdin to its end; one line out for each line in, blank lines skipped.
pub fn run(args: PromptArgs) -> anyhow::Result<()> {
    let prompter = Prompter::load(&args.router_tokenizer_path, options(&args)?)?;
    let engine = EngineRules::of_engine(&args.engine);
    let mut output = std::io::BufWriter::new(std::io::stdout().lock());
    for line in std::io::stdin().lock().lines() {
        let line = line.context("reading stdin")?;
        if line.trim().is_empty() {
            continue;
        }
        let answer = inspect(&prompter, engine, args.block_size, &line);
        serde_json::to_writer(&mut output, &answer)?;
        output.write_all(b"\n")?;
        output.flush()?;
    }
    Ok(())
}

fn options(args: &PromptArgs) -> anyhow::Result<PrompterOptions> {
    let now = args.now.as_deref().map(str::parse::<jiff::Timestamp>).transpose().context("--now")?;
    Ok(PrompterOptions {
        allow_request_chat_template: args.allow_request_chat_template,
        chat_template_kwargs: serde_json::from_str(&args.kv_default_chat_template_kwargs)
            .context("--kv-default-chat-template-kwargs")?,
        now: now.map(SystemTime::try_from).transpose().context("--now")?,
        encoder: if args.reference_encoder { EncoderChoice::Reference } else { EncoderChoice::Checked },
        ..PrompterOptions::default()
    })
}

fn inspect(prompter: &Prompter, engine: EngineRules, block_size: usize, line: &str) -> Answer {
    let (id, body) = match serde_json::from_str::<Line>(line) {
        Ok(Line { id, body: Some(body) }) => (id, body.get()),
        _ => (None, line),
    };
    let endpoint = endpoint_of(body);
    match prompter.tokens(endpoint, engine, body.as_bytes()) {
        Ok(prompt) => {
            let blocks = prompt.blocks(block_size).hashes.iter().map(|hash| format!("{:016x}", hash.0)).collect();
            let Prompt { text, ids } = prompt;
            let is_chat = endpoint != Endpoint::Completions && text.is_some();
            let renderer = is_chat.then(|| prompter.chat_renderer(engine));
            Answer::Prompt { id, renderer, text, ids, blocks }
        }
        Err(refusal) => Answer::Refused { id, error: refusal.to_string() },
    }
}

/// A body with `messages` is a chat request, one with `input` and no prompt a Responses request, any other a completion.
fn endpoint_of(body: &str) -> Endpoint {
    #[derive(serde::Deserialize)]
    struct Shape {
        messages: Option<serde::de::IgnoredAny>,
        prompt: Option<serde::de::IgnoredAny>,
        input: Option<serde::de::IgnoredAny>,
    }
    match serde_json::from_str::<Shape>(body) {
        Ok(Shape { messages: Some(_), .. }) => Endpoint::Chat,
        Ok(Shape { prompt: None, input: Some(_), .. }) => Endpoint::Responses,
        _ => Endpoint::Completions,
    }
}
