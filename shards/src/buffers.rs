//! Byte buffers of one shard, in two sizes. It owns two LIFO pools per thread and never hands a buffer to
//! another thread by itself.
//!
//! A stream *waits* with a small buffer: the read that is posted while nothing happens pins only 768 bytes, which
//! still takes a whole event of the usual kind. A read that fills it is continued at once with a large one, so
//! bursts are moved in 16 KiB pieces. Nothing has to be cancelled to get from one to the other.

use std::cell::RefCell;

/// Capacity of a waiting buffer, bytes.
pub(crate) const SMALL_BYTES: usize = 768;
/// Capacity of a working buffer, bytes. 4 KiB halves the coalescing in bursts, more brings nothing.
pub(crate) const LARGE_BYTES: usize = 16 << 10;
/// A buffer that grew beyond this is freed, not kept.
const KEPT_BYTES_MAX: usize = 64 << 10;
/// Buffers kept per size and thread.
const KEPT_MAX: usize = 256;

struct Pools {
    small: Vec<Vec<u8>>,
    large: Vec<Vec<u8>>,
}

thread_local! {
    static POOLS: RefCell<Pools> = const { RefCell::new(Pools { small: Vec::new(), large: Vec::new() }) };
}

/// An empty buffer of [`SMALL_BYTES`].
pub(crate) fn take_small() -> Vec<u8> {
    POOLS.with_borrow_mut(|pools| pools.small.pop()).unwrap_or_else(|| Vec::with_capacity(SMALL_BYTES))
}

/// An empty buffer of at least [`LARGE_BYTES`].
pub(crate) fn take_large() -> Vec<u8> {
    POOLS.with_borrow_mut(|pools| pools.large.pop()).unwrap_or_else(|| Vec::with_capacity(LARGE_BYTES))
}

/// Gives a buffer of any origin back; its content is gone.
pub(crate) fn give(mut buffer: Vec<u8>) {
    let capacity = buffer.capacity();
    if !(SMALL_BYTES..=KEPT_BYTES_MAX).contains(&capacity) {
        return;
    }
    buffer.clear();
    POOLS.with_borrow_mut(|pools| {
        let pool = if capacity >= LARGE_BYTES { &mut pools.large } else { &mut pools.small };
        if pool.len() < KEPT_MAX {
            pool.push(buffer);
        }
    });
}

/// Large buffers that are kept and not lent to anybody.
#[cfg(test)]
pub(crate) fn large_kept() -> usize {
    POOLS.with_borrow(|pools| pools.large.len())
}

/// Frees all kept buffers.
pub(crate) fn clear() {
    POOLS.with_borrow_mut(|pools| *pools = Pools { small: Vec::new(), large: Vec::new() });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_return_to_the_pool_of_their_size() {
        let mut large = take_large();
        large.extend_from_slice(b"old bytes");
        let address = large.as_ptr();
        give(large);
        give(take_small());
        let again = take_large();
        assert_eq!(again.as_ptr(), address);
        assert!(again.is_empty() && again.capacity() >= LARGE_BYTES);
        assert!(take_small().capacity() < LARGE_BYTES);
    }

    #[test]
    fn grown_and_tiny_buffers_are_freed() {
        give(Vec::with_capacity(KEPT_BYTES_MAX + 1));
        give(Vec::with_capacity(3));
        POOLS.with_borrow(|pools| assert!(pools.large.is_empty() && pools.small.is_empty()));
    }
}
