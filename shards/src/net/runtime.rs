//! Builds the runtime of a shard on the best driver there is and says which one it became. It owns the order of
//! attempts and the operator's explanation, and never runs anything but the shard's main future.

use std::future::Future;
use std::io;

use monoio::time::TimeDriver;
use monoio::{IoUringDriver, LegacyDriver, Runtime, RuntimeBuilder};

use crate::config::DriverChoice;

/// Entries of the submission ring. It bounds one batch, not the operations in flight.
const RING_ENTRIES: u32 = 2048;

/// The driver a shard really runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverReport {
    /// `io_uring` or `epoll`.
    pub name: &'static str,
    /// Ring set-up flags in force.
    pub flags: Vec<&'static str>,
    /// Why it is not io_uring although that was wanted, with what to change; one line.
    pub fallback_reason: Option<String>,
}

pub(crate) enum ShardRuntime {
    Uring(Box<Runtime<TimeDriver<IoUringDriver>>>),
    Epoll(Box<Runtime<TimeDriver<LegacyDriver>>>),
}

impl ShardRuntime {
    /// Builds on the calling thread, which must be the one that runs it (a rule of SINGLE_ISSUER).
    pub(crate) fn build(choice: DriverChoice) -> io::Result<(ShardRuntime, DriverReport)> {
        if choice == DriverChoice::Epoll || forced_epoll() {
            let report = DriverReport { name: "epoll", flags: Vec::new(), fallback_reason: None };
            return Ok((ShardRuntime::Epoll(Box::new(epoll()?)), report));
        }
        match uring() {
            Ok((runtime, flags)) => {
                let report = DriverReport { name: "io_uring", flags, fallback_reason: None };
                Ok((ShardRuntime::Uring(Box::new(runtime)), report))
            }
            Err(error) => {
                let sysctl = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok();
                let reason = explain(&error, sysctl.as_deref().map(str::trim));
                let report = DriverReport { name: "epoll", flags: Vec::new(), fallback_reason: Some(reason) };
                Ok((ShardRuntime::Epoll(Box::new(epoll()?)), report))
            }
        }
    }

    pub(crate) fn block_on<F: Future>(&mut self, future: F) -> F::Output {
        match self {
            ShardRuntime::Uring(runtime) => runtime.block_on(future),
            ShardRuntime::Epoll(runtime) => runtime.block_on(future),
        }
    }
}

fn forced_epoll() -> bool {
    std::env::var("MONOIO_FORCE_LEGACY_DRIVER")
        .is_ok_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes"))
}

fn epoll() -> io::Result<Runtime<TimeDriver<LegacyDriver>>> {
    RuntimeBuilder::<LegacyDriver>::new().enable_timer().build()
}

/// Tries flags from best to none by really building a ring: the runtime's own probe uses no flags and would promise
/// what an older kernel then refuses.
fn uring() -> io::Result<(Runtime<TimeDriver<IoUringDriver>>, Vec<&'static str>)> {
    let mut deferred = io_uring::IoUring::builder();
    deferred.setup_single_issuer().setup_defer_taskrun();
    let mut cooperative = io_uring::IoUring::builder();
    cooperative.setup_coop_taskrun();
    let attempts = [
        (deferred, vec!["SINGLE_ISSUER", "DEFER_TASKRUN"]),
        (cooperative, vec!["COOP_TASKRUN"]),
        (io_uring::IoUring::builder(), vec![]),
    ];
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for (ring, flags) in attempts {
        let built = RuntimeBuilder::<IoUringDriver>::new()
            .with_entries(RING_ENTRIES)
            .uring_builder(ring)
            .enable_timer()
            .build();
        match built {
            Ok(_) if !monoio::utils::detect_uring() => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the kernel lacks ring operations that are needed",
                ));
            }
            Ok(runtime) => return Ok((runtime, flags)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// One line for the operator. `sysctl` is the value of `kernel.io_uring_disabled` where it can be read.
fn explain(error: &io::Error, sysctl: Option<&str>) -> String {
    let cause = match error.raw_os_error() {
        Some(code) if code == rustix::io::Errno::PERM.raw_os_error() => "the kernel does not permit it",
        Some(code) if code == rustix::io::Errno::NOSYS.raw_os_error() => {
            "the kernel does not have it, or a filter hides it"
        }
        Some(code) if code == rustix::io::Errno::NOMEM.raw_os_error() => {
            "the locked-memory limit (ulimit -l) is too small"
        }
        _ => "it could not be set up",
    };
    let value = sysctl.map_or(String::from("unknown here"), |value| format!("now {value}"));
    format!(
        "io_uring is unavailable: {cause} ({error}); running on epoll, which costs more CPU under load. Check `sysctl \
         kernel.io_uring_disabled` ({value}, must be 0) and, in a container, a seccomp profile that allows \
         io_uring_setup, io_uring_enter and io_uring_register (Docker's default one does not)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_explanation_names_both_remedies_on_one_line() {
        for code in [1, 38, 12, 22] {
            let text = explain(&io::Error::from_raw_os_error(code), Some("2"));
            assert!(text.contains("kernel.io_uring_disabled") && text.contains("seccomp"), "{text}");
            assert!(text.contains("now 2") && !text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn epoll_is_taken_when_asked_for() {
        let (mut runtime, report) = ShardRuntime::build(DriverChoice::Epoll).expect("epoll builds");
        assert_eq!(report.name, "epoll");
        assert_eq!(report.fallback_reason, None);
        assert_eq!(runtime.block_on(async { 7 }), 7);
    }
}
