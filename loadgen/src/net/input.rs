//! Owns what has arrived on a connection and is not yet consumed. Never reads by itself.

/// Bytes in order of arrival; taking from the front moves nothing.
#[derive(Default)]
pub struct Input {
    bytes: Vec<u8>,
    taken: usize,
}

impl Input {
    pub fn rest(&self) -> &[u8] {
        &self.bytes[self.taken..]
    }

    pub fn len(&self) -> usize {
        self.bytes.len() - self.taken
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops the first `count` bytes, at most as many as there are.
    pub fn take(&mut self, count: usize) {
        self.taken += count;
        if self.taken >= self.bytes.len() {
            self.bytes.clear();
            self.taken = 0;
        }
    }

    /// Where to append what arrives.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        if self.taken > 0 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        &mut self.bytes
    }
}
