//! Names of one attempt's transfers: bootstrap rooms and what is spelled from them. Fresh for every attempt and
//! every sequence, from a cryptographic generator, never from anything a client sent. No IO.

use rand::RngCore;
use smallvec::SmallVec;

/// The ids of one attempt on one pair of workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptIds {
    /// One room per sequence, all distinct, each in `1..2^63`.
    rooms: SmallVec<[u64; 1]>,
    /// SGLang's request id as raw JSON. Spelled once, because both legs carry it, and the room's digits are a part of it.
    rid: String,
}

/// What stands before the room's digits in [`AttemptIds::rid`].
const BEFORE_ROOM: &str = "\"infera-";

/// SGLang's request ids of one attempt, spelled only when somebody asks: most attempts are never aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestIds {
    room: u64,
    sequences: usize,
}

impl RequestIds {
    /// One per sequence: the engine appends `_<i>` for sample i when there are several.
    pub fn spelled(self) -> Vec<String> {
        match self.sequences {
            1 => vec![rid(self.room)],
            sequences => (0..sequences).map(|at| format!("{}_{at}", rid(self.room))).collect(),
        }
    }
}

fn rid(room: u64) -> String {
    format!("infera-{room}")
}

impl AttemptIds {
    /// Draws one room for each of `sequences` (at least 1). `rank` is the prefill rank and the number of ranks:
    /// the decode engine looks for the KV on rank `room mod ranks`, so the room must say which one was picked.
    pub fn draw(random: &mut impl RngCore, sequences: usize, rank: Option<(u32, u32)>) -> Self {
        let mut rooms = SmallVec::<[u64; 1]>::with_capacity(sequences.max(1));
        while rooms.len() < sequences.max(1) {
            let room = match rank {
                Some((rank, ranks)) => aligned(random.next_u64() >> 1, rank, ranks),
                None => random.next_u64() >> 1,
            };
            // Engines take a room of 0 for none.
            if room != 0 && !rooms.contains(&room) {
                rooms.push(room);
            }
        }
        Self::of(rooms)
    }

    /// Of rooms that were drawn, at least one.
    pub(super) fn of(rooms: SmallVec<[u64; 1]>) -> Self {
        let mut digits = itoa::Buffer::new();
        let rid = [BEFORE_ROOM, digits.format(rooms[0]), "\""].concat();
        Self { rooms, rid }
    }

    pub fn rooms(&self) -> &[u64] {
        &self.rooms
    }

    /// The first room, from which everything else of the attempt is spelled.
    pub fn room(&self) -> u64 {
        self.rooms[0]
    }

    /// SGLang's request id as raw JSON; with n > 1 the engine appends `_<i>` for sample i.
    pub(super) fn rid_json(&self) -> &str {
        &self.rid
    }

    /// The first room's digits.
    pub(super) fn room_json(&self) -> &str {
        &self.rid[BEFORE_ROOM.len()..self.rid.len() - 1]
    }

    /// What to abort.
    pub fn request_ids(&self) -> RequestIds {
        RequestIds { room: self.room(), sequences: self.rooms.len() }
    }

    /// `<prefix>-<32 hex digits>`.
    pub fn transfer_id(&self, prefix: &str) -> String {
        format!("{prefix}-{:032x}", self.room())
    }
}

/// The largest number up to `room` that leaves `rank` when divided by `ranks`; one step of `ranks` higher where
/// there is none. Stays below 2^63.
fn aligned(room: u64, rank: u32, ranks: u32) -> u64 {
    let (rank, ranks) = (u64::from(rank), u64::from(ranks.max(1)));
    assert!(rank < ranks, "rank {rank} of {ranks}");
    let candidate = room - room % ranks + rank;
    if candidate >= 1 << 63 { candidate - ranks } else { candidate }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use smallvec::smallvec;

    use super::*;

    #[test]
    fn b41_a_room_says_which_rank_holds_the_kv() {
        assert_eq!(aligned(1003, 0, 2), 1002);
        assert_eq!(aligned(1003, 2, 4), 1002);
        assert_eq!(aligned(1000, 3, 4), 1003);
        let last = (1 << 63) - 1;
        for ranks in 1..70 {
            for rank in 0..ranks {
                let room = aligned(last, rank, ranks);
                assert_eq!((room % u64::from(ranks), room < 1 << 63), (u64::from(rank), true));
            }
        }
        let mut random = rand::rng();
        for ranks in [2, 4] {
            for at in 0..1000 {
                let rank = at % ranks;
                let ids = AttemptIds::draw(&mut random, 3, Some((rank, ranks)));
                assert!(ids.rooms().iter().all(|room| room % u64::from(ranks) == u64::from(rank)), "{ids:?}");
            }
        }
    }

    #[test]
    fn b38_rooms_are_distinct_over_many_attempts_and_fit_63_bits() {
        let mut random = rand::rng();
        let mut seen = HashSet::new();
        for at in 0..100_000 {
            let ids = AttemptIds::draw(&mut random, 1 + at % 2, None);
            for room in ids.rooms() {
                assert!(*room > 0 && *room < 1 << 63);
                assert!(seen.insert(*room), "{room} was drawn twice");
            }
        }
    }

    #[test]
    fn b38_two_processes_do_not_draw_the_same() {
        // Each generator is seeded by the system, so two draws from fresh ones stand for two processes.
        let draw = || std::thread::spawn(|| AttemptIds::draw(&mut rand::rng(), 4, None)).join().expect("it draws");
        let (left, right) = (draw(), draw());
        assert!(left.rooms().iter().all(|room| !right.rooms().contains(room)), "{left:?} {right:?}");
    }

    #[test]
    fn ids_are_spelled_from_the_first_room() {
        let ids = AttemptIds::of(smallvec![42, 7]);
        assert_eq!(ids.room_json(), "42");
        assert_eq!(ids.rid_json(), "\"infera-42\"");
        assert_eq!(AttemptIds::of(smallvec![42]).request_ids().spelled(), ["infera-42"]);
        assert_eq!(ids.request_ids().spelled(), ["infera-42_0", "infera-42_1"]);
        assert_eq!(ids.transfer_id("xfer"), "xfer-0000000000000000000000000000002a");
    }
}
