//! Owns `loadgen engine`: flags, start, the lines to paste, stop on a signal.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use clap::Args;
use loadgen::engine::disagg::{Disagg, PdProtocol, PdRole};
use loadgen::engine::events::EngineStyle;
use loadgen::engine::faults::Faults;
use loadgen::engine::register::{EtcdTarget, Registration};
use loadgen::engine::speed::SpeedArguments;
use loadgen::engine::{Engine, EngineConfig};
use loadgen::prompt::TextModel;

/// A JSON object.
#[derive(Clone)]
struct Object(serde_json::Map<String, serde_json::Value>);

fn object(text: &str) -> Result<Object, String> {
    serde_json::from_str(text).map(Object).map_err(|error| format!("not a JSON object: {error}"))
}

#[derive(Args)]
pub struct EngineArguments {
    /// Template arguments added to every chat that does not set them.
    #[arg(long, value_name = "JSON", default_value = "{}", value_parser = object)]
    default_chat_template_kwargs: Object,
    /// Do not answer /tokenize.
    #[arg(long)]
    no_tokenize: bool,
    /// Do not answer /v1/messages, as engines of before did not.
    #[arg(long)]
    no_messages: bool,
    /// Engines to run in this process; with fixed ports, each next one takes the port after.
    #[arg(long, default_value_t = 1)]
    engines: u16,
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// HTTP port; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// KV event port of rank 0, rank r is at + r; 0 takes free ones.
    #[arg(long, default_value_t = 0)]
    events_port: u16,
    #[arg(long, default_value = "demo")]
    model: String,
    #[arg(long, value_enum, default_value = "vllm")]
    engine_style: EngineStyle,
    /// Event topic.
    #[arg(long, default_value = "kv-events")]
    topic: String,
    /// Publish 32-byte block hashes instead of integers (vLLM styles).
    #[arg(long)]
    byte_hashes: bool,
    /// Directory with tokenizer.json and tokenizer_config.json; the shipped tokenizer if absent.
    #[arg(long)]
    tokenizer_path: Option<PathBuf>,
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    dp_size: u32,
    /// Tokens per KV block.
    #[arg(long, default_value_t = 16)]
    block_size: usize,
    /// KV blocks per rank.
    #[arg(long, default_value_t = 8192)]
    blocks: usize,
    /// KV blocks of host memory per rank: computed blocks are copied there, and loaded back once the device has evicted them.
    #[arg(long, default_value_t = 0, conflicts_with = "no_prefix_cache")]
    host_blocks: usize,
    /// Give every request KV blocks of its own.
    #[arg(long)]
    no_prefix_cache: bool,
    #[arg(long, default_value_t = 131_072)]
    context_length: usize,
    /// Answer length when max_tokens does not cut it.
    #[arg(long, default_value_t = 256)]
    answer_tokens: usize,
    #[command(flatten)]
    speed: SpeedArguments,
    /// Share of requests answered with 500, 0 to 1.
    #[arg(long, default_value_t = 0.0)]
    fail_rate: f64,
    /// Be one half of a prefill/decode pair.
    #[arg(long, value_enum, requires = "protocol")]
    role: Option<PdRole>,
    /// How prefill and decode find each other.
    #[arg(long, value_enum, requires = "role")]
    protocol: Option<PdProtocol>,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Register here (`host:port`) under a lease.
    #[arg(long)]
    etcd_endpoint: Option<String>,
    #[arg(long, default_value = "/infera/workers/")]
    etcd_prefix: String,
}

impl EngineArguments {
    fn config(&self, number: u16) -> Result<EngineConfig> {
        let port = |base: u16, step: u16| if base == 0 { 0 } else { base.saturating_add(number * step) };
        Ok(EngineConfig {
            model: self.model.clone(),
            style: self.engine_style,
            host: self.host,
            port: port(self.port, 1),
            events_port: port(self.events_port, self.dp_size as u16),
            topic: self.topic.clone(),
            byte_hashes: self.byte_hashes,
            replay: true,
            dp_size: self.dp_size,
            block_size: self.block_size,
            blocks_total: self.blocks,
            host_blocks: self.host_blocks,
            prefix_cache: !self.no_prefix_cache,
            context_length: self.context_length,
            answer_tokens: self.answer_tokens,
            speed: self.speed.speed()?,
            seed: self.seed.wrapping_add(number.into()),
            faults: Faults { fail_rate: self.fail_rate, ..Faults::default() },
            chat_template_kwargs: self.default_chat_template_kwargs.0.clone(),
            tokenizes: !self.no_tokenize,
            speaks_messages: !self.no_messages,
            disagg: self.role.zip(self.protocol).map(|(role, protocol)| Disagg::new(role, protocol)),
        })
    }
}

pub fn run(arguments: EngineArguments) -> Result<ExitCode> {
    let text = match &arguments.tokenizer_path {
        Some(directory) => TextModel::from_directory(directory)?,
        None => TextModel::shipped()?,
    };
    let configs = (0..arguments.engines).map(|number| arguments.config(number)).collect::<Result<_>>()?;
    let engines = Engine::start_group(configs, Arc::new(text))?;
    let records: Vec<_> = engines.iter().map(|engine| engine.registration()).collect();
    for (engine, record) in engines.iter().zip(&records) {
        println!("{record}");
        println!("--worker {}", engine.worker_flag());
    }
    let registration = match arguments.etcd_endpoint {
        Some(endpoint) => Some(Registration::start(EtcdTarget { endpoint, prefix: arguments.etcd_prefix }, records)?),
        None => None,
    };
    super::wait_for_interrupt()?;
    // The registration goes first, so that routers stop sending before the engines are gone.
    drop(registration);
    engines.into_iter().for_each(|engine| engine.stop());
    Ok(ExitCode::SUCCESS)
}
