//! A zero-copy msgpack cursor over one payload. Trusts no length: a prefix larger than what is left is an error, and
//! nothing is ever allocated by a number that the wire claims.

use rmp::Marker;
use wide::u8x16;

use super::BatchError;

/// The head of one value. Strings, bytes and extensions come whole; an array's or map's elements follow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Head<'a> {
    Nil,
    Bool(bool),
    Unsigned(u64),
    /// Always below 0.
    Negative(i64),
    Float,
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Ext,
    /// Number of elements that follow.
    Array(usize),
    /// Number of key-value pairs that follow.
    Map(usize),
}

#[derive(Clone, Copy, Debug)]
pub struct Cursor<'a> {
    rest: &'a [u8],
}

/// Bytes whose heads are found at once, and the numbers that are then read: as many as are in there for certain, since a
/// number of them that differs from time to time would cost as much as they do. Two places are lost to shifting.
const WINDOW: usize = 64;
const STEPS: usize = (WINDOW - 2) / 5;

impl<'a> Cursor<'a> {
    pub fn new(payload: &'a [u8]) -> Self {
        Self { rest: payload }
    }

    /// Bytes not read yet; also an upper bound for the number of values that can still follow.
    pub fn remaining(&self) -> &'a [u8] {
        self.rest
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], BatchError> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(BatchError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], BatchError> {
        let (taken, rest) = self.rest.split_first_chunk::<N>().ok_or(BatchError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn length8(&mut self) -> Result<usize, BatchError> {
        Ok(usize::from(u8::from_be_bytes(self.number()?)))
    }

    fn length16(&mut self) -> Result<usize, BatchError> {
        Ok(usize::from(u16::from_be_bytes(self.number()?)))
    }

    fn length32(&mut self) -> Result<usize, BatchError> {
        Ok(u32::from_be_bytes(self.number()?) as usize)
    }

    /// Reads the next head (and, for strings and bytes, the value).
    #[inline]
    pub fn head(&mut self) -> Result<Head<'a>, BatchError> {
        let (&first, rest) = self.rest.split_first().ok_or(BatchError::Truncated)?;
        self.rest = rest;
        Ok(match first {
            0..0x80 => Head::Unsigned(u64::from(first)),
            0x80..0x90 => Head::Map(usize::from(first & 0x0f)),
            0x90..0xa0 => Head::Array(usize::from(first & 0x0f)),
            0xa0..0xc0 => Head::Str(self.take(usize::from(first & 0x1f))?),
            0xe0.. => Head::Negative(i64::from(first as i8)),
            _ => return self.long_head(Marker::from_u8(first)),
        })
    }

    fn long_head(&mut self, marker: Marker) -> Result<Head<'a>, BatchError> {
        Ok(match marker {
            Marker::Null => Head::Nil,
            Marker::False => Head::Bool(false),
            Marker::True => Head::Bool(true),
            Marker::U8 => Head::Unsigned(u64::from(u8::from_be_bytes(self.number()?))),
            Marker::U16 => Head::Unsigned(u64::from(u16::from_be_bytes(self.number()?))),
            Marker::U32 => Head::Unsigned(u64::from(u32::from_be_bytes(self.number()?))),
            Marker::U64 => Head::Unsigned(u64::from_be_bytes(self.number()?)),
            Marker::I8 => signed(i64::from(i8::from_be_bytes(self.number()?))),
            Marker::I16 => signed(i64::from(i16::from_be_bytes(self.number()?))),
            Marker::I32 => signed(i64::from(i32::from_be_bytes(self.number()?))),
            Marker::I64 => signed(i64::from_be_bytes(self.number()?)),
            marker => return self.sized_head(marker),
        })
    }

    fn sized_head(&mut self, marker: Marker) -> Result<Head<'a>, BatchError> {
        let length = match marker {
            Marker::Str8 | Marker::Bin8 | Marker::Ext8 => self.length8()?,
            Marker::Str16 | Marker::Bin16 | Marker::Ext16 | Marker::Array16 | Marker::Map16 => self.length16()?,
            Marker::Str32 | Marker::Bin32 | Marker::Ext32 | Marker::Array32 | Marker::Map32 => self.length32()?,
            Marker::FixExt1 => 1,
            Marker::FixExt2 => 2,
            Marker::FixExt4 | Marker::F32 => 4,
            Marker::FixExt8 | Marker::F64 => 8,
            Marker::FixExt16 => 16,
            _ => return Err(BatchError::NotMsgpack),
        };
        Ok(match marker {
            Marker::Array16 | Marker::Array32 => Head::Array(length),
            Marker::Map16 | Marker::Map32 => Head::Map(length),
            Marker::Str8 | Marker::Str16 | Marker::Str32 => Head::Str(self.take(length)?),
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => Head::Bin(self.take(length)?),
            Marker::F32 | Marker::F64 => {
                self.take(length)?;
                Head::Float
            }
            _ => {
                // One byte of type in front of an extension's data.
                self.take(1)?;
                self.take(length)?;
                Head::Ext
            }
        })
    }

    /// Reads as many of the next `length` values as are unsigned integers of at most 32 bits in their usual spellings, and
    /// stops before the first other one (or at the end). Token ids make up nearly all of a payload; this is their fast way:
    /// without a branch on the width, which nobody can predict, since ids on both sides of 65,536 are common.
    pub fn numbers(&mut self, length: usize, out: &mut Vec<u32>) {
        let mut rest = self.rest;
        let start = out.len();
        // Every value takes a byte at least, so this allocates by what is there, not by what is claimed. A window writes
        // before it knows how many of its values count.
        let wanted = length.min(rest.len());
        out.resize(start + wanted + STEPS, 0);
        let mut read = 0;
        while read < wanted {
            let window = rest.first_chunk::<{ WINDOW + 8 }>().zip(out[start + read..].first_chunk_mut::<STEPS>());
            if let Some((window, slots)) = window {
                let (numbers, bytes) = window_numbers(window, slots, wanted - read);
                read += numbers;
                rest = &rest[bytes..];
                if numbers == STEPS || read == wanted {
                    continue;
                }
            }
            // Near the end of the payload there is no window, and what stops one is not always the end of the numbers.
            let Some((number, tail)) = plain_number(rest) else { break };
            out[start + read] = number;
            read += 1;
            rest = tail;
        }
        out.truncate(start + read);
        self.rest = rest;
    }

    /// Reads as many of the next `length` values as are integers of 64 bits, signed or not, as one bit pattern each: what
    /// block hashes nearly always are. Stops before the first other one.
    pub fn wide_numbers(&mut self, length: usize, mut each: impl FnMut(u64)) -> usize {
        let mut read = 0;
        while read < length
            && let Some(([0xcf | 0xd3, number @ ..], rest)) = self.rest.split_first_chunk::<9>()
        {
            each(u64::from_be_bytes(*number));
            self.rest = rest;
            read += 1;
        }
        read
    }

    /// Skips one whole value, however deep, without recursion.
    pub fn skip(&mut self) -> Result<(), BatchError> {
        let mut pending: u64 = 1;
        while pending > 0 {
            pending -= 1;
            match self.head()? {
                Head::Array(length) => pending += length as u64,
                Head::Map(length) => pending += 2 * length as u64,
                _ => {}
            }
        }
        Ok(())
    }

    /// Skips one value and returns its bytes.
    pub fn raw(&mut self) -> Result<&'a [u8], BatchError> {
        let start = self.rest;
        self.skip()?;
        Ok(&start[..start.len() - self.rest.len()])
    }
}

/// One number of at most 32 bits in a usual spelling, and what follows it.
fn plain_number(bytes: &[u8]) -> Option<(u32, &[u8])> {
    Some(match bytes {
        [0xcd, high, low, tail @ ..] => (u32::from(u16::from_be_bytes([*high, *low])), tail),
        [0xce, a, b, c, d, tail @ ..] => (u32::from_be_bytes([*a, *b, *c, *d]), tail),
        [value @ 0..0x80, tail @ ..] | [0xcc, value, tail @ ..] => (u32::from(*value), tail),
        _ => return None,
    })
}

/// Reads [`STEPS`] numbers into `out`, or fewer: at most `wanted`, and up to the first value that is not of one, three or five
/// bytes. Returns how many there are, and their bytes.
///
/// Where a number begins follows from the one before, and that chain is all that costs time here. So it is kept to three steps
/// in registers: the masks lie so that their bits at hand, together, are the number of bytes after the head. (A load of the
/// head byte would be twice as long, and a third mask, for ids from 128 to 255, a step more.) All else is beside the chain
/// or after it: any other value is read as if it were of one byte, and then does not count.
#[inline]
fn window_numbers(window: &[u8; WINDOW + 8], out: &mut [u32; STEPS], wanted: usize) -> (usize, usize) {
    /// By the bytes after the head: what is a number's own of the four bytes that it ends with.
    const OWN: [u32; 8] = [0xff, 0, 0xffff, 0, u32::MAX, 0, 0, 0];
    let (bytes, _) = window.split_first_chunk::<WINDOW>().expect("a window is longer than its heads");
    let [two, four, other] = head_masks(bytes);
    let (mut twos, mut fours) = (two << 1, four << 2);
    let (mut at, mut heads) = (0, 0u64);
    for slot in out {
        heads |= 1 << at;
        let further = (twos & 2 | fours & 4) as usize;
        (twos, fours) = (twos >> 1 >> further, fours >> 1 >> further);
        let number = window[at % WINDOW..].first_chunk::<8>().expect("8 bytes follow the last head");
        let end = u64::from_be_bytes(*number).rotate_left(8 + 8 * further as u32);
        *slot = end as u32 & OWN[further];
        at += 1 + further;
    }
    if wanted >= STEPS && heads & other == 0 {
        return (STEPS, at);
    }
    let mut left = heads;
    let mut read = 0;
    while read < wanted && left != 0 && other >> left.trailing_zeros() & 1 == 0 {
        left &= left - 1;
        read += 1;
    }
    (read, if left == 0 { at } else { left.trailing_zeros() as usize })
}

/// One bit for each byte that would be the head of a number with two and with four bytes after it, and of neither these nor a
/// number of one byte.
#[inline]
fn head_masks(bytes: &[u8; WINDOW]) -> [u64; 3] {
    let heads = [0xcd, 0xce].map(u8x16::splat);
    let mut masks = [0; 3];
    for (at, sixteen) in bytes.as_chunks::<16>().0.iter().enumerate() {
        let vector = u8x16::new(*sixteen);
        let found = [vector.simd_eq(heads[0]), vector.simd_eq(heads[1]), vector];
        for (mask, bits) in masks.iter_mut().zip(found) {
            *mask |= u64::from(bits.to_bitmask()) << (16 * at);
        }
    }
    let [two, four, high] = masks;
    [two, four, high & !(two | four)]
}

/// Non-negative values are one variant, whatever width or signedness the wire used.
fn signed(value: i64) -> Head<'static> {
    u64::try_from(value).map_or(Head::Negative(value), Head::Unsigned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_of_every_width() {
        let check = |bytes: &[u8], expected: Head<'_>| {
            let mut cursor = Cursor::new(bytes);
            assert_eq!(cursor.head(), Ok(expected), "{bytes:02x?}");
            for cut in 0..bytes.len() {
                assert_eq!(Cursor::new(&bytes[..cut]).head(), Err(BatchError::Truncated), "{bytes:02x?} cut at {cut}");
            }
        };
        check(&[0x07], Head::Unsigned(7));
        check(&[0xd0, 0x07], Head::Unsigned(7));
        check(&[0xff], Head::Negative(-1));
        check(&[0xd1, 0xff, 0xfe], Head::Negative(-2));
        check(&[0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], Head::Unsigned(u64::MAX));
        check(&[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0], Head::Negative(i64::MIN));
        check(&[0xd9, 2, b'a', b'b'], Head::Str(b"ab"));
        check(&[0xc4, 1, 9], Head::Bin(&[9]));
        check(&[0xd4, 5, 9], Head::Ext);
        check(&[0xc7, 2, 5, 9, 9], Head::Ext);
        check(&[0xdd, 0xff, 0xff, 0xff, 0xff], Head::Array(u32::MAX as usize));
        check(&[0xde, 0, 3], Head::Map(3));
        check(&[0xca, 0, 0, 0, 0], Head::Float);
    }

    /// The fast way reads what the plain one reads, wherever the payload ends.
    #[test]
    fn numbers_of_every_width_up_to_the_first_other_value() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut bytes = Vec::new();
            for _ in 0..random.usize(0..40) {
                let value = random.u32(..) >> random.u32(0..32);
                match value {
                    0..0x80 if random.bool() => bytes.push(value as u8),
                    0..0x100 if random.bool() => bytes.extend([0xcc, value as u8]),
                    0..0x1_0000 if random.bool() => {
                        bytes.push(0xcd);
                        bytes.extend((value as u16).to_be_bytes());
                    }
                    _ => {
                        bytes.push(0xce);
                        bytes.extend(value.to_be_bytes());
                    }
                }
            }
            if random.bool() {
                bytes.insert(random.usize(0..=bytes.len()), random.u8(..));
            }
            for cut in 0..=bytes.len() {
                let length = random.usize(0..45);
                let (mut fast, mut plain) = (Cursor::new(&bytes[..cut]), Cursor::new(&bytes[..cut]));
                let mut numbers = vec![7];
                fast.numbers(length, &mut numbers);
                let mut expected = vec![7];
                for _ in 0..length {
                    let before = plain;
                    match plain.head() {
                        Ok(Head::Unsigned(value)) if matches!(before.rest[0], 0..0x80 | 0xcc..=0xce) => {
                            expected.push(value as u32);
                        }
                        _ => {
                            plain = before;
                            break;
                        }
                    }
                }
                assert_eq!((numbers, fast.rest), (expected, plain.rest), "seed {seed}: {bytes:02x?} cut at {cut}");
            }
        }
    }

    #[test]
    fn lying_lengths_end_in_an_error() {
        for bytes in
            [&[0xdd, 0xff, 0xff, 0xff, 0xff][..], &[0xdf, 0xff, 0xff, 0xff, 0xff, 0xc0], &[0xdb, 0x7f, 0, 0, 0, b'x']]
        {
            assert_eq!(Cursor::new(bytes).skip(), Err(BatchError::Truncated), "{bytes:02x?}");
        }
        let deep = vec![0x91; 1 << 20];
        assert_eq!(Cursor::new(&deep).skip(), Err(BatchError::Truncated));
        assert_eq!(Cursor::new(&[0xc1]).skip(), Err(BatchError::NotMsgpack));
    }
}
