//! A cold long text spread over encoder threads: volunteers encode pieces while the thread that leads joins them in order.
//!
//! Exact because pieces meet where a tokenizer cuts anyway (`segments`). Never waits for a volunteer to start: the leading
//! thread encodes every piece that nobody has begun, so a full or dead pool costs nothing but the help.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::NoBlocks;
use super::block_maker::Text;
use super::encoder::Encoder;
use super::segments::Piece;

/// Hands a job to another thread; `false` when there is none to spare.
pub type Submit = Arc<dyn Fn(Box<dyn FnOnce() + Send>) -> bool + Send + Sync>;

/// Ids of a piece, or why there are none.
type Ids = Result<Vec<u32>, NoBlocks>;

/// One text that several threads encode.
pub struct Ahead {
    encoder: Arc<Encoder>,
    text: Arc<Text>,
    pieces: Arc<[Piece]>,
    claimed: Box<[AtomicBool]>,
    /// From here on volunteers look for something to do.
    next: AtomicUsize,
    done: Mutex<Vec<Option<Ids>>>,
    changed: Condvar,
}

/// Fills a place even if the encoder panics, so that the leading thread never waits for ever.
struct Filled<'a> {
    ahead: &'a Ahead,
    place: usize,
    ids: Ids,
}

impl Drop for Filled<'_> {
    fn drop(&mut self) {
        let ids = std::mem::replace(&mut self.ids, Err(NoBlocks::EncodeFailed));
        self.ahead.done.lock().unwrap_or_else(PoisonError::into_inner)[self.place] = Some(ids);
        self.ahead.changed.notify_all();
    }
}

impl Ahead {
    /// Asks up to `volunteers` threads to encode what lies behind piece `first`.
    pub fn start(
        encoder: &Arc<Encoder>,
        text: &Arc<Text>,
        pieces: &Arc<[Piece]>,
        first: usize,
        volunteers: usize,
        submit: &Submit,
    ) -> Arc<Self> {
        let ahead = Arc::new(Self {
            encoder: encoder.clone(),
            text: text.clone(),
            pieces: pieces.clone(),
            claimed: pieces.iter().map(|_| AtomicBool::new(false)).collect(),
            // The leading thread begins with the first piece itself.
            next: AtomicUsize::new(first + 1),
            done: Mutex::new(pieces.iter().map(|_| None).collect()),
            changed: Condvar::new(),
        });
        for _ in 0..volunteers {
            // Weak: a volunteer that starts when all is over finds nothing.
            let volunteer = Arc::downgrade(&ahead);
            let is_taken = submit(Box::new(move || {
                if let Some(ahead) = volunteer.upgrade() {
                    ahead.help();
                }
            }));
            if !is_taken {
                break;
            }
        }
        ahead
    }

    fn help(&self) {
        loop {
            let place = self.next.fetch_add(1, Ordering::Relaxed);
            if place >= self.pieces.len() {
                return;
            }
            if self.claims(place) {
                let mut filled = Filled { ahead: self, place, ids: Err(NoBlocks::EncodeFailed) };
                filled.ids = self.encoded(place);
            }
        }
    }

    fn claims(&self, place: usize) -> bool {
        !self.claimed[place].swap(true, Ordering::Relaxed)
    }

    fn encoded(&self, place: usize) -> Ids {
        self.encoder.encode_range(&self.text.text, self.pieces[place].range.clone(), &self.text.cuts)
    }

    /// Ids of one piece: encoded here, or by the volunteer that has begun it.
    pub fn ids(&self, place: usize) -> Ids {
        if self.claims(place) {
            return self.encoded(place);
        }
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(ids) = done[place].take() {
                return ids;
            }
            done = self.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A piece that is known by now needs no encoding.
    pub fn skip(&self, place: usize) {
        self.claims(place);
    }
}
