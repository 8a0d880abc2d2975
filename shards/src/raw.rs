//! The only unsafe code of the crate: shared access to a runtime stream, its descriptor as a borrowed one, the bytes of a
//! runtime buffer, the filter of a listener that is about to close, the allocator and its release call, and the
//! processor's prefetch. It never does IO of its own.
//!
//! Why shared access is needed: one task reads from a client (to see it leave) while it writes to it. The runtime's stream
//! takes `&mut self` for both and its split halves offer no readiness wait and shut the socket down on drop.

use std::cell::UnsafeCell;
use std::future::Future;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::rc::Rc;

use monoio::BufResult;
use monoio::buf::{IoBuf, IoBufMut};
use monoio::io::{AsyncReadRent, AsyncWriteRent};
use monoio::net::TcpStream;

/// A stream that several futures of one thread use at once. `UnsafeCell` makes it `!Sync`, the runtime's handle `!Send`.
pub(crate) struct SharedStream(UnsafeCell<TcpStream>);

impl SharedStream {
    pub(crate) fn new(stream: TcpStream) -> SharedStream {
        SharedStream(UnsafeCell::new(stream))
    }

    /// One send, submitted by this call; resolves to the bytes taken by the kernel and the buffer.
    pub(crate) fn send<B: IoBuf>(&self, buffer: B) -> impl Future<Output = BufResult<usize, B>> + use<B> {
        // SAFETY: `write` is not an async fn: it clones the descriptor's handle into an operation and returns a future
        // that owns both. The lifetime in that future's type is therefore only a formality, and `'static` is as good as
        // any; nothing uses the reference after this call. Calls cannot overlap: the type is !Sync, and `write` runs no
        // code of ours but the buffer's pointer and length.
        let stream: &'static mut TcpStream = unsafe { &mut *self.0.get() };
        stream.write(buffer)
    }

    /// One receive into the buffer's free part, submitted by this call.
    pub(crate) fn receive<B: IoBufMut>(&self, buffer: B) -> impl Future<Output = BufResult<usize, B>> + use<B> {
        // SAFETY: as in `send`; `read` has the same shape.
        let stream: &'static mut TcpStream = unsafe { &mut *self.0.get() };
        stream.read(buffer)
    }

    /// Waits until a read would not block: bytes, end of stream or an error. Consumes nothing, may be dropped at will.
    // An `async fn` would keep the holder twice: as its argument and as its local.
    #[allow(clippy::manual_async_fn)]
    pub(crate) fn readable<H: AsRef<SharedStream>>(
        holder: Rc<H>,
    ) -> impl Future<Output = std::io::Result<()>> + use<H> {
        async move {
            // SAFETY: `readable` reads the reference only on its first poll, to clone the handle, before any other
            // code can run; `send` and `receive` make their short-lived exclusive reference later or earlier, never
            // during that poll, and this reference is not used after it. The holder keeps the stream alive.
            let stream = unsafe { &*(*holder).as_ref().0.get() };
            // Not `relaxed`: our own non-blocking reads leave the epoll driver's readiness flag stale.
            stream.readable(false).await
        }
    }

    /// Waits until a write would not block, or fails. May be dropped at will.
    #[allow(clippy::manual_async_fn)]
    pub(crate) fn writable<H: AsRef<SharedStream>>(
        holder: Rc<H>,
    ) -> impl Future<Output = std::io::Result<()>> + use<H> {
        async move {
            // SAFETY: as in `readable`; `writable` has the same shape.
            let stream = unsafe { &*(*holder).as_ref().0.get() };
            stream.writable(false).await
        }
    }

    /// The descriptor, for system calls that neither block nor close it.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the stream owns the descriptor and lives at least as long as `self`; `as_raw_fd` only copies a
        // number out, and no exclusive reference exists outside the calls above.
        unsafe { BorrowedFd::borrow_raw((*self.0.get()).as_raw_fd()) }
    }
}

/// The bytes of a buffer that is about to be sent.
pub(crate) fn bytes_of<B: IoBuf>(buffer: &B) -> &[u8] {
    // SAFETY: the trait, which is unsafe to implement, promises that so many bytes behind the pointer are initialized and
    // stay where they are; the slice borrows the buffer, so nobody changes it meanwhile.
    unsafe { std::slice::from_raw_parts(buffer.read_ptr(), buffer.bytes_init()) }
}

/// Copies bytes into a buffer behind the `filled` ones that were copied before, as far as there is room; gives their number.
pub(crate) fn append_to<B: IoBufMut>(buffer: &mut B, filled: usize, bytes: &[u8]) -> usize {
    let taken = bytes.len().min(buffer.bytes_total().saturating_sub(filled));
    // SAFETY: the trait, which is unsafe to implement, promises `bytes_total` writable bytes behind the pointer; `filled` plus
    // `taken` is at most that, and the source, a shared slice, cannot overlap what is borrowed exclusively. All bytes in
    // front of the new end have been written: the caller's by former calls, these here.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.write_ptr().add(filled), taken);
        buffer.set_init(filled + taken);
    }
    taken
}

/// Lets a listening socket take no further handshakes, without refusing them: their first packets are dropped, so their
/// senders try again a second later, and then meet whoever listens on the port by then. Handshakes that have begun go on.
pub(crate) fn drop_new_handshakes(listener: BorrowedFd<'_>) -> std::io::Result<()> {
    // Classic BPF over the TCP header, which is where a socket filter of a TCP socket begins: byte 13 holds the flags.
    const FLAGS_AT: u32 = 13;
    const SYN: u32 = 0x02;
    const SYN_OR_ACK: u32 = 0x12;
    let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, FLAGS_AT),
        step(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, SYN_OR_ACK),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, SYN),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    let length = std::mem::size_of::<libc::sock_fprog>() as libc::socklen_t;
    // SAFETY: the kernel copies the program during the call, in which both it and its steps live; the length is the
    // struct's own, and the descriptor is borrowed from an owner that outlives the call.
    let failed = unsafe {
        let program = std::ptr::from_ref(&program).cast();
        libc::setsockopt(listener.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, program, length) != 0
    };
    if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// mimalloc as a process's allocator. Its call for aligned memory takes a detour for nearly everything above 1 KiB, which
/// asks for more than is wanted and makes the block's way back long; what asks for a word's alignment, as most futures do,
/// needs no such call.
#[cfg(feature = "mimalloc")]
pub struct Allocator;

#[cfg(feature = "mimalloc")]
impl Allocator {
    /// Every block of mimalloc is aligned to a machine word.
    fn is_plain(layout: std::alloc::Layout) -> bool {
        layout.align() <= align_of::<usize>()
    }
}

// SAFETY: all blocks come from mimalloc, whose `free` and `realloc` take what any of its calls has given. The plain calls
// are used for a word's alignment at most, which each of its blocks has; the aligned ones give what they are asked for.
// Sizes are passed on as they are, a failed call gives null, and nothing here unwinds.
#[cfg(feature = "mimalloc")]
unsafe impl std::alloc::GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        // SAFETY: any size and any power of two may be asked for.
        let block = unsafe {
            match Self::is_plain(layout) {
                true => libmimalloc_sys::mi_malloc(layout.size()),
                false => libmimalloc_sys::mi_malloc_aligned(layout.size(), layout.align()),
            }
        };
        block.cast()
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: std::alloc::Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let block = unsafe {
            match Self::is_plain(layout) {
                true => libmimalloc_sys::mi_zalloc(layout.size()),
                false => libmimalloc_sys::mi_zalloc_aligned(layout.size(), layout.align()),
            }
        };
        block.cast()
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, _layout: std::alloc::Layout) {
        // SAFETY: the caller gives back a block of this allocator.
        unsafe { libmimalloc_sys::mi_free(block.cast()) }
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: std::alloc::Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as in `dealloc` and `alloc`; the alignment stays what it was.
        let block = unsafe {
            match Self::is_plain(layout) {
                true => libmimalloc_sys::mi_realloc(block.cast(), new_size),
                false => libmimalloc_sys::mi_realloc_aligned(block.cast(), new_size, layout.align()),
            }
        };
        block.cast()
    }
}

/// Hands the calling thread's free memory, and what ended threads left, back to the kernel. mimalloc does so by itself only while it is called, so a
/// thread that falls quiet after a peak would keep the peak. Does nothing without the feature `mimalloc`.
pub fn release_free_memory() {
    #[cfg(feature = "mimalloc")]
    // SAFETY: the function takes no pointer and may be called at any time from any thread.
    unsafe {
        libmimalloc_sys::mi_collect(true);
    }
}

/// Asks the processor to bring a value's first cache line near, and does not wait for it: nothing is read. Does nothing where
/// the standard library has no such call.
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; it reads nothing that the program could see, and the address is that of a live value.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}
