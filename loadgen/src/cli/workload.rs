//! Owns the flags of `loadgen run` that say what is asked: a named workload with changed numbers, or a file to replay.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::sync::LazyLock;

use anyhow::{Context, Result, ensure};
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use loadgen::plan::trace::read_trace;
use loadgen::plan::{Documents, Images, Recipe, Shape, Shared};
use loadgen::run::endpoint::Endpoint;
use loadgen::run::recording::read_recording;
use loadgen::run::workload::{Source, Workload};

/// Requests of a generated workload unless told otherwise.
const REQUESTS: usize = 200;

/// Workloads whose lengths are all as told.
#[derive(Clone, Copy, ValueEnum)]
enum Exact {
    /// One of 16 system prompts of 2,000 tokens (Zipf 1.0) and a unique question of 100; every length as told.
    SharedPrefix,
    /// Conversations of 6 turns without pauses: one of 16 system prompts, messages of 100 tokens; every length as told.
    MultiTurn,
    /// Rounds over 12 pictures, each in an order of its own, and a question of 24 tokens.
    Images,
}

#[derive(Clone, Copy)]
enum Kind {
    Exact(Exact),
    /// Those of the plan, whose lengths vary.
    Drawn(Shape),
}

impl ValueEnum for Kind {
    fn value_variants<'a>() -> &'a [Kind] {
        static ALL: LazyLock<Vec<Kind>> = LazyLock::new(|| {
            let exact = Exact::value_variants().iter().map(|exact| Kind::Exact(*exact));
            exact.chain(Shape::value_variants().iter().map(|shape| Kind::Drawn(*shape))).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Kind::Exact(exact) => exact.to_possible_value(),
            Kind::Drawn(shape) => shape.to_possible_value(),
        }
    }
}

/// What is asked.
#[derive(Args)]
pub struct WorkloadArguments {
    /// Named workload; the numbers that it comes with are changed by the flags below.
    #[arg(long, value_enum, default_value = "shared-prefix", conflicts_with_all = ["trace", "recording"])]
    workload: Kind,
    /// Replay a trace in Mooncake's format (`timestamp`, `input_length`, `output_length`, `hash_ids`).
    #[arg(long, value_name = "FILE", conflicts_with = "recording")]
    trace: Option<PathBuf>,
    /// Replay recorded requests: JSON lines with `body`, `time` in seconds, and `path` where it is not the chat's.
    #[arg(long, value_name = "FILE")]
    recording: Option<PathBuf>,
    /// What is asked; what is recorded goes where it went. Pictures are for chats only.
    #[arg(long, value_enum, default_value = "chat", conflicts_with = "recording")]
    endpoint: Endpoint,
    /// Requests [default: 200, or all of a file].
    #[arg(long)]
    requests: Option<usize>,
    /// Distinct system prompts.
    #[arg(long, value_name = "NUMBER")]
    groups: Option<usize>,
    /// Exponent of their popularity, 0 = all alike.
    #[arg(long)]
    zipf: Option<f64>,
    /// Tokens of each system prompt.
    #[arg(long)]
    prefix_tokens: Option<usize>,
    /// Tokens of the unique part of each message.
    #[arg(long)]
    suffix_tokens: Option<usize>,
    #[arg(long)]
    output_tokens: Option<usize>,
    /// Turns per conversation.
    #[arg(long)]
    turns: Option<usize>,
    /// Between an answer and the next turn.
    #[arg(long)]
    think_seconds: Option<f64>,
    /// Standard deviation of the logarithm of lengths and pauses, 0 = all alike.
    #[arg(long)]
    length_spread: Option<f64>,
    /// Distinct documents.
    #[arg(long, value_name = "NUMBER")]
    documents: Option<usize>,
    #[arg(long, value_name = "NUMBER")]
    documents_per_request: Option<usize>,
    #[arg(long)]
    document_tokens: Option<usize>,
    /// Pictures that come again.
    #[arg(long, value_name = "NUMBER")]
    images: Option<usize>,
    /// Length of a picture's `data:` reference.
    #[arg(long, value_name = "BYTES")]
    image_bytes: Option<usize>,
    /// Share of requests with a picture that nobody has shown before.
    #[arg(long, value_name = "SHARE")]
    new_images: Option<f64>,
    /// Histories quote answers from the seed instead of the server's own.
    #[arg(long)]
    scripted_answers: bool,
    /// Ask for whole answers instead of streams.
    #[arg(long)]
    unary: bool,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl WorkloadArguments {
    /// Whether every request brings its own model.
    pub fn names_models(&self) -> bool {
        self.recording.is_some()
    }

    pub fn is_replay(&self) -> bool {
        self.trace.is_some() || self.recording.is_some()
    }

    /// The workload; reads the file to replay.
    pub fn workload(&self, model: String) -> Result<Workload> {
        let requests = self.requests.unwrap_or(if self.is_replay() { usize::MAX } else { REQUESTS });
        ensure!(requests > 0, "--requests must be at least 1");
        let open = |path: &PathBuf| File::open(path).with_context(|| format!("opening {}", path.display()));
        let (source, requests) = if let Some(path) = &self.trace {
            let lines =
                read_trace(BufReader::new(open(path)?), requests).with_context(|| path.display().to_string())?;
            let count = lines.len();
            (Source::Trace { file: path.display().to_string(), lines: lines.into() }, count)
        } else if let Some(path) = &self.recording {
            let recorded =
                read_recording(BufReader::new(open(path)?), requests).with_context(|| path.display().to_string())?;
            let count = recorded.len();
            (Source::Recording { file: path.display().to_string(), requests: recorded.into() }, count)
        } else {
            (Source::Generated(self.recipe()?), requests)
        };
        let shows_pictures = matches!(&source, Source::Generated(recipe) if recipe.images.is_some());
        ensure!(
            self.endpoint == Endpoint::Chat || !shows_pictures,
            "pictures can only be shown in chats: --endpoint chat"
        );
        let (stream, scripted_answers, seed) = (!self.unary, self.scripted_answers, self.seed);
        Ok(Workload { source, endpoint: self.endpoint, requests, model, stream, seed, scripted_answers })
    }

    fn recipe(&self) -> Result<Recipe> {
        let mut recipe = self.workload.recipe();
        let set = |place: &mut f64, told: Option<f64>| *place = told.unwrap_or(*place);
        let count = |told: Option<usize>| told.map(|count| count as f64);
        set(&mut recipe.message_tokens, count(self.suffix_tokens));
        set(&mut recipe.answer_tokens, count(self.output_tokens));
        set(&mut recipe.turns, count(self.turns));
        set(&mut recipe.pause_s, self.think_seconds);
        set(&mut recipe.spread, self.length_spread);
        if self.groups.or(self.prefix_tokens).is_some() || self.zipf.is_some() {
            let shared = recipe.shared.get_or_insert(Shared { count: 16, zipf: 1.0, tokens: 2000 });
            shared.count = self.groups.unwrap_or(shared.count);
            shared.tokens = self.prefix_tokens.unwrap_or(shared.tokens);
            set(&mut shared.zipf, self.zipf);
        }
        recipe.shared = recipe.shared.filter(|shared| shared.tokens > 0);
        if self.documents.or(self.documents_per_request).or(self.document_tokens).is_some() {
            let documents = Documents { count: 400, zipf: 0.9, per_session: 3, tokens: 1500 };
            let documents = recipe.documents.get_or_insert(documents);
            documents.count = self.documents.unwrap_or(documents.count);
            documents.per_session = self.documents_per_request.unwrap_or(documents.per_session);
            documents.tokens = self.document_tokens.unwrap_or(documents.tokens);
        }
        if self.images.or(self.image_bytes).is_some() || self.new_images.is_some() {
            let images = recipe.images.get_or_insert(IMAGES);
            images.count = self.images.unwrap_or(images.count);
            images.bytes = self.image_bytes.unwrap_or(images.bytes);
            set(&mut images.new_share, self.new_images);
        }
        check(&recipe)?;
        Ok(recipe)
    }
}

const IMAGES: Images = Images { count: 12, bytes: 20_000, new_share: 0.0 };

fn check(recipe: &Recipe) -> Result<()> {
    ensure!(recipe.answer_tokens >= 1.0, "--output-tokens must be at least 1");
    ensure!(recipe.turns >= 1.0, "--turns must be at least 1");
    let finite = |name: &str, value: f64, most: f64| {
        ensure!((0.0..=most).contains(&value), "{name} must be between 0 and {most}, not {value}");
        Ok(())
    };
    finite("--think-seconds", recipe.pause_s, 1e6)?;
    finite("--length-spread", recipe.spread, 3.0)?;
    if let Some(shared) = &recipe.shared {
        ensure!(shared.count > 0, "--groups must be at least 1");
        finite("--zipf", shared.zipf, 20.0)?;
    }
    if let Some(documents) = &recipe.documents {
        ensure!(documents.count > 0 && documents.tokens > 0, "--documents and --document-tokens must be at least 1");
    }
    if let Some(images) = &recipe.images {
        ensure!(images.count > 0, "--images must be at least 1");
        finite("--new-images", images.new_share, 1.0)?;
    }
    Ok(())
}

impl Kind {
    fn recipe(self) -> Recipe {
        match self {
            Kind::Exact(Exact::SharedPrefix) => Recipe::shared_prefix(16, 1.0, 2000, 100, 32),
            Kind::Exact(Exact::MultiTurn) => {
                Recipe { name: "multi-turn".into(), turns: 6.0, ..Recipe::shared_prefix(16, 0.0, 2000, 100, 32) }
            }
            Kind::Exact(Exact::Images) => Recipe { images: Some(IMAGES), ..Recipe::plain("images", 24.0, 32.0) },
            Kind::Drawn(shape) => shape.recipe(),
        }
    }
}
