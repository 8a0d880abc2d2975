//! One spare buffer per thread for rendered texts.
//!
//! A text of half a megabyte that is allocated anew for every request costs more in pages fetched from the kernel than
//! in rendering.

use std::cell::RefCell;

/// Longest buffer that is kept, bytes.
const SPARE_BYTES_MAX: usize = 4 << 20;

thread_local! {
    static SPARE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// An empty buffer with room for `capacity` bytes, the thread's own one if it has it.
pub fn take(capacity: usize) -> Vec<u8> {
    let mut buffer = SPARE.with(RefCell::take);
    buffer.clear();
    buffer.reserve(capacity);
    buffer
}

/// Gives a buffer back for the thread's next text.
pub fn give(buffer: Vec<u8>) {
    if buffer.capacity() <= SPARE_BYTES_MAX {
        SPARE.with(|spare| {
            if spare.borrow().capacity() < buffer.capacity() {
                spare.replace(buffer);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_buffer_within_bounds_is_kept() {
        give(vec![1; 1000]);
        give(vec![1; 10]);
        let buffer = take(0);
        assert!(buffer.is_empty() && buffer.capacity() >= 1000);
        assert_eq!(take(0).capacity(), 0, "it was taken");
        give(Vec::with_capacity(SPARE_BYTES_MAX + 1));
        assert_eq!(take(0).capacity(), 0, "too long to keep");
    }
}
