//! A small pool of threads for encoding long prompts, so that a relay on a shard never waits for one.
//!
//! Its threads run at the process's own priority. A lower one was measured and is worse where shards and encoders share
//! a core: a shard then waits for what a preempted encoder holds, the kernel's lock on the address space above all.
//!
//! Knows nothing of shards or requests: a job is a closure that does the work and hands its result over
//! itself. The caller keeps the deadline; a job whose caller has given up should notice and return early.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};

use crate::limits::ENCODER_QUEUE_JOBS;

type Job = Box<dyn FnOnce() + Send>;

/// Encoder threads over one bounded queue. Dropping it finishes the queued jobs and joins the threads.
pub struct EncoderPool {
    queue: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl EncoderPool {
    /// Starts `threads` threads (at least one) over a queue of `ENCODER_QUEUE_JOBS` jobs for each.
    pub fn start(threads: usize) -> std::io::Result<Self> {
        Self::start_warm(threads, || ())
    }

    /// The same; `warm_up` runs on each thread before its first job.
    pub fn start_warm(threads: usize, warm_up: impl Fn() + Clone + Send + 'static) -> std::io::Result<Self> {
        let threads = threads.max(1);
        Self::start_with_queue(threads, threads * ENCODER_QUEUE_JOBS, warm_up)
    }

    fn start_with_queue(
        threads: usize,
        queue_jobs: usize,
        warm_up: impl Fn() + Clone + Send + 'static,
    ) -> std::io::Result<Self> {
        let (sender, receiver) = bounded::<Job>(queue_jobs);
        let threads = (0..threads)
            .map(|index| {
                let (receiver, warm_up) = (receiver.clone(), warm_up.clone());
                let thread = std::thread::Builder::new().name(format!("encoder-{index}"));
                thread.spawn(move || {
                    warm_up();
                    run(&receiver);
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { queue: Some(sender), threads })
    }

    /// Queues a job; `false` if the queue is full, and then the job was dropped unrun.
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) -> bool {
        let Some(queue) = &self.queue else { return false };
        match queue.try_send(Box::new(job)) {
            Ok(()) => true,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => false,
        }
    }

    /// Threads of the pool.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }
}

fn run(jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        // A panicking job drops its completion, which its caller sees; the thread goes on.
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!("an encoder job panicked; its request is routed by load");
        }
    }
}

impl Drop for EncoderPool {
    fn drop(&mut self) {
        self.queue = None;
        for thread in self.threads.drain(..) {
            // A join error would be a panic outside of a job, which `run` cannot have.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn runs_jobs_and_survives_a_panicking_one() {
        let pool = EncoderPool::start(2).unwrap();
        let (sender, receiver) = mpsc::channel();
        assert!(pool.submit(|| panic!("a job that fails, on purpose")));
        for number in 0..100 {
            let sender = sender.clone();
            assert!(pool.submit(move || sender.send(number).unwrap()));
        }
        drop(pool);
        drop(sender);
        let mut done: Vec<i32> = receiver.iter().collect();
        done.sort_unstable();
        assert_eq!(done, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn every_thread_warms_up_before_its_first_job() {
        use std::cell::Cell;
        thread_local!(static WARM: Cell<bool> = const { Cell::new(false) });
        let pool = EncoderPool::start_warm(3, || WARM.set(true)).unwrap();
        let (sender, receiver) = mpsc::channel();
        for _ in 0..30 {
            let sender = sender.clone();
            assert!(pool.submit(move || sender.send(WARM.get()).unwrap()));
        }
        drop((pool, sender));
        assert_eq!(receiver.iter().collect::<Vec<_>>(), [true; 30]);
    }

    #[test]
    fn a_full_queue_refuses_and_drops_the_job() {
        let pool = EncoderPool::start_with_queue(1, 2, || ()).unwrap();
        let (release, wait) = mpsc::channel::<()>();
        let (started, running) = mpsc::channel::<()>();
        assert!(pool.submit(move || {
            started.send(()).unwrap();
            wait.recv().unwrap();
        }));
        running.recv().unwrap();
        assert!(pool.submit(|| {}));
        assert!(pool.submit(|| {}));
        assert!(!pool.submit(|| {}));
        release.send(()).unwrap();
    }
}
