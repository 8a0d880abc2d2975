//! What a 100,000-token prompt costs the router: a conversation whose last turn is new, and one never seen before, next
//! to its encoders alone and to nginx moving the same bytes. Owns the command line and the exit code.
//!
//! The router is a release process on one core (its shard and one encoder thread), behind it a backend that reads and
//! answers. Its CPU is what `/proc` accounts for, kernel and forwarding included, over requests sent one after another
//! on one connection. The encoders run here, on the same prompts, by this thread's CPU time.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bench::answer::{self, Answer, JSON_BYTES};
use bench::backend::Backend;
use bench::conversation::{self, Writer};
use bench::exchange::Exchange;
use bench::machine::{Cores, Host, Interrupt, pin_current_thread, raise_descriptor_limit, thread_cpu};
use bench::process::Process;
use bench::report::{ending, progress, write_json};
use bench::rivals::{Kind, Rival, Running, build_router, find_tool, kv_aware_router};
use bench::statistics::{Spread, spread};
use clap::Parser;
use infera_router::prompt::{EncoderChoice, Endpoint, EngineRules, Prompter, PrompterOptions};
use serde::Serialize;

/// CPU per request of long prompts.
///
/// Exit code: 0 measured and every goal met (short prompts are not judged), 1 a goal missed, 2 the run could not be done.
#[derive(Parser)]
struct Arguments {
    #[arg(long)]
    json: Option<PathBuf>,
    /// Model directory; tests/setup/fetch_tokenizers.sh fetches it.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tokenizers/qwen3"))]
    tokenizer: PathBuf,
    #[arg(long)]
    router: Option<PathBuf>,
    /// Tokens of a prompt; goals are judged from 100,000 on.
    #[arg(long, default_value_t = 100_000)]
    tokens: usize,
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Requests of one kind in a round.
    #[arg(long, default_value_t = 24)]
    requests: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Bytes of the turn that is new: an answer and a question, some 250 tokens.
const TURN_BYTES: usize = 1000;
const JUDGED_TOKENS_MIN: usize = 100_000;
const NEXT_TURN_MAX_MS: f64 = 1.0;
const WHOLE_RATIO_MIN: f64 = 100.0;

#[derive(Serialize)]
struct Goal {
    name: &'static str,
    value: f64,
    limit: f64,
    met: bool,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    host: Host,
    tokens: usize,
    body_bytes: usize,
    requests_per_round: usize,
    /// CPU per request or encoding, milliseconds.
    next_turn_ms: Spread,
    cold_ms: Spread,
    nginx_ms: Option<Spread>,
    fast_encoder_ms: Spread,
    reference_encoder_ms: Spread,
    goals: Vec<Goal>,
}

fn main() -> ExitCode {
    ending("long_prompt", run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<bool> {
    let program = arguments.router.clone().map_or_else(build_router, Ok)?;
    let interrupt = Interrupt::install()?;
    let host = Host::describe(raise_descriptor_limit()?);
    let cores = Cores::detect()?;
    pin_current_thread(cores.load)?;
    let directory = tempfile::Builder::new().prefix("bench-").tempdir()?;
    let backend = Backend::start(cores.load, Answer::json(JSON_BYTES))?;
    let start = |rival: &Rival| {
        let payload = Answer::json(JSON_BYTES).payload;
        let request = answer::request("bench", false, 200);
        rival.start(backend.address(), directory.path(), cores, (&request, &payload), &interrupt)
    };
    let router = kv_aware_router(&program, &arguments.tokenizer, "");
    let router = start(&Rival { name: "router".to_owned(), kind: Kind::Command(router) })?;
    let nginx = match find_tool("nginx", "nginx-light") {
        Ok(nginx) => Some(start(&Rival { name: "nginx".to_owned(), kind: Kind::Nginx(nginx) })?),
        Err(error) => {
            progress(&format!("{error}; going on without it"));
            None
        }
    };
    let report = measure(arguments, host, &router, nginx.as_ref(), &interrupt)?;
    print(&report);
    write_json(arguments.json.as_deref(), &report)?;
    Ok(report.goals.iter().all(|goal| goal.met))
}

fn measure(
    arguments: &Arguments,
    host: Host,
    router: &Running,
    nginx: Option<&Running>,
    interrupt: &Interrupt,
) -> Result<Report> {
    let load = |encoder| {
        let options = PrompterOptions { encoder, cache_bytes: 0, ..PrompterOptions::default() };
        Prompter::load(&arguments.tokenizer, options)
    };
    let (fast, reference) = (load(EncoderChoice::Checked)?, load(EncoderChoice::Reference)?);
    let is_judged = arguments.tokens >= JUDGED_TOKENS_MIN;
    ensure!(fast.encodes_fast() || !is_judged, "the fast encoder does not take this model");
    let mut writer = Writer::new(arguments.seed);
    let prompt = |prompter: &Prompter, body: &[u8]| {
        prompter.tokens(Endpoint::Chat, EngineRules::Vllm, body).map_err(|error| anyhow::anyhow!("{error}"))
    };
    // Text of this kind has about four bytes a token; what is missing is written.
    let mut base = writer.conversation(arguments.tokens * 4);
    let tokens = loop {
        let tokens = prompt(&fast, &conversation::body(&base))?.ids.len();
        if tokens >= arguments.tokens {
            break tokens;
        }
        base.extend(writer.turn((arguments.tokens - tokens) * 4 + 400));
    };
    let body_bytes = conversation::body(&base).len();
    progress(&format!("{tokens} tokens, {} messages, {body_bytes} bytes", base.len()));
    let mut clients =
        (Exchange::connect(router.address)?, nginx.map(|nginx| Exchange::connect(nginx.address)).transpose()?);
    let next_turns = |writer: &mut Writer| -> Vec<Vec<u8>> {
        let turn = |_| [base.clone(), writer.turn(TURN_BYTES).to_vec()].concat();
        (0..arguments.requests).map(turn).map(|messages| conversation::body(&messages)).collect()
    };
    let (mut next_ms, mut cold_ms, mut nginx_ms) = (Vec::new(), Vec::new(), Vec::new());
    let (mut fast_ms, mut reference_ms) = (Vec::new(), Vec::new());
    // The conversation's beginning becomes known, and everything warm.
    spend(router, &mut clients.0, &[conversation::body(&base)])?;
    spend(router, &mut clients.0, &next_turns(&mut writer))?;
    for round in 0..arguments.rounds {
        interrupt.check()?;
        let bodies = next_turns(&mut writer);
        next_ms.push(spend(router, &mut clients.0, &bodies)?);
        if let (Some(nginx), Some(client)) = (nginx, &mut clients.1) {
            nginx_ms.push(spend(nginx, client, &bodies)?);
        }
        let cold: Vec<Vec<u8>> = (0..(arguments.requests / 4).max(1))
            .map(|_| conversation::body(&writer.conversation(body_bytes * 96 / 100)))
            .collect();
        cold_ms.push(spend(router, &mut clients.0, &cold)?);
        // Rendered by the reference, and on a thread of its own: a text that the fast encoder has just met, on whatever
        // thread, finds its merges in the processor's caches. Here each is to be as new as it was to the router.
        let texts = std::thread::scope(|scope| {
            let (cold, prompt, reference) = (&cold, &prompt, &reference);
            let text = move |body: &Vec<u8>| prompt(reference, body)?.text.context("a text");
            let rendering = scope.spawn(move || cold.iter().map(text).collect::<Result<Vec<_>>>());
            rendering.join().map_err(|_| anyhow::anyhow!("rendering panicked"))?
        })?;
        fast_ms.push(encode(&fast, &texts)?);
        reference_ms.push(encode(&reference, &texts[..1])?);
        progress(&format!(
            "round {round}: next turn {:.3} ms, cold {:.2}, fast encoder {:.2}, reference {:.0}, nginx {:.3}",
            next_ms[round],
            cold_ms[round],
            fast_ms[round],
            reference_ms[round],
            nginx_ms.last().copied().unwrap_or(f64::NAN)
        ));
    }
    let spread_of = |values: Vec<f64>| spread(values).context("no round");
    let (next_turn_ms, cold_ms) = (spread_of(next_ms)?, spread_of(cold_ms)?);
    let (fast_encoder_ms, reference_encoder_ms) = (spread_of(fast_ms)?, spread_of(reference_ms)?);
    let goals = if !is_judged {
        Vec::new()
    } else {
        let whole_ratio = reference_encoder_ms.median / next_turn_ms.median;
        let cold_limit = fast_encoder_ms.median * 1.15 + 1.0;
        vec![
            goal("next turn, ms", next_turn_ms.median, NEXT_TURN_MAX_MS),
            Goal {
                name: "whole encoding / next turn",
                value: whole_ratio,
                limit: WHOLE_RATIO_MIN,
                met: whole_ratio >= WHOLE_RATIO_MIN,
            },
            goal("cold, ms", cold_ms.median, cold_limit),
        ]
    };
    Ok(Report {
        schema: "infera-long-prompt/1",
        host,
        tokens,
        body_bytes,
        requests_per_round: arguments.requests,
        next_turn_ms,
        cold_ms,
        nginx_ms: spread(nginx_ms),
        fast_encoder_ms,
        reference_encoder_ms,
        goals,
    })
}

fn goal(name: &'static str, value: f64, limit: f64) -> Goal {
    Goal { name, value, limit, met: value <= limit }
}

/// CPU of the proxy per request, milliseconds.
fn spend(proxy: &Running, client: &mut Exchange, bodies: &[Vec<u8>]) -> Result<f64> {
    let host = proxy.address.to_string();
    let requests: Vec<Vec<u8>> = bodies.iter().map(|body| conversation::request(&host, body)).collect();
    let members = proxy.process.members()?;
    let before = Process::cpu(&members);
    for request in &requests {
        client.run(request, |_| ())?;
    }
    let spent = Process::cpu(&members).saturating_sub(before);
    Ok(per(spent, bodies.len()))
}

/// CPU of this thread per text, milliseconds.
fn encode(prompter: &Prompter, texts: &[String]) -> Result<f64> {
    let before = thread_cpu();
    for text in texts {
        prompter.encode(text).map_err(|error| anyhow::anyhow!("{error}"))?;
    }
    Ok(per(thread_cpu() - before, texts.len()))
}

fn per(spent: Duration, units: usize) -> f64 {
    spent.as_secs_f64() * 1e3 / units as f64
}

#[allow(clippy::print_stdout)]
fn print(report: &Report) {
    println!("{} tokens, {} bytes; CPU in ms: median (quartiles)", report.tokens, report.body_bytes);
    let row =
        |name: &str, spread: &Spread| println!("{name:<28} {:>9.3} ({:.3}-{:.3})", spread.median, spread.q1, spread.q3);
    row("router, next turn", &report.next_turn_ms);
    row("router, never seen", &report.cold_ms);
    row("fast encoder alone", &report.fast_encoder_ms);
    row("tokenizers 0.23 alone", &report.reference_encoder_ms);
    if let Some(nginx) = &report.nginx_ms {
        row("nginx, the same bytes", nginx);
    }
    for goal in &report.goals {
        println!(
            "{:<28} {:>9.3} (limit {:.3}) {}",
            goal.name,
            goal.value,
            goal.limit,
            if goal.met { "met" } else { "MISSED" }
        );
    }
}
