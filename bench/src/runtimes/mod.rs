//! The comparison that the choice of runtime rests on: one small pass-through proxy per runtime and flag set.
//!
//! Owns the candidates and the code they share. Never used by the router: these proxies handle what the harness
//! sends and nothing more.

pub mod codec;
#[cfg(feature = "glommio")]
pub mod glommio_proxy;
pub mod monoio_proxy;
pub mod relay;

use std::net::SocketAddr;

use anyhow::Result;
use clap::ValueEnum;

/// Bytes of every buffer of every candidate, so that they differ in their runtime only.
pub const BUFFER_BYTES: usize = 16 << 10;

/// One runtime with its flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Candidate {
    /// A plain TCP relay on epoll: the floor, four socket operations a request and no HTTP.
    RelayEpoll,
    /// monoio on io_uring without flags.
    Monoio,
    /// monoio with `IORING_SETUP_COOP_TASKRUN` (kernel 5.19).
    MonoioCoop,
    /// monoio with `IORING_SETUP_SINGLE_ISSUER` and `IORING_SETUP_DEFER_TASKRUN` (kernel 6.1).
    MonoioDefer,
    /// monoio on its epoll driver.
    MonoioEpoll,
    /// glommio 0.9, which has neither flags nor an epoll driver.
    #[cfg(feature = "glommio")]
    Glommio,
}

impl Candidate {
    /// The name that the command line and the table use.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Serves `listen` in front of `upstream` on the calling thread until the process is ended.
    pub fn serve(self, listen: SocketAddr, upstream: SocketAddr) -> Result<()> {
        match self {
            Candidate::RelayEpoll => relay::serve(listen, upstream),
            #[cfg(feature = "glommio")]
            Candidate::Glommio => glommio_proxy::serve(listen, upstream),
            monoio => monoio_proxy::serve(monoio, listen, upstream),
        }
    }
}
