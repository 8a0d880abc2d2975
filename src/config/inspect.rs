//! Arguments of the `inspect` subcommands. What they do is `src/inspect/`'s.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Clone, Args)]
pub struct PromptArgs {
    /// Model directory or tokenizer.json.
    #[arg(long, alias = "kv-tokenizer-path", value_name = "PATH")]
    pub router_tokenizer_path: PathBuf,
    /// Tokens per block.
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub block_size: u32,
    /// Render as this engine does: vllm|sglang.
    #[arg(long, value_name = "ENGINE")]
    pub engine: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct EventsArgs {
    /// Read live frames from this publisher instead of stdin.
    #[arg(long, value_name = "tcp://HOST:PORT")]
    pub connect: Option<String>,
    /// Print the visible plain-namespace hashes, hex, sorted.
    #[arg(long)]
    pub hashes: bool,
}
