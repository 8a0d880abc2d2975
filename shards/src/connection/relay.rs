//! Moves an upstream's answer to the client. It owns the choice of framing towards the client and the rule that a cut
//! answer is never finished politely; it never holds more than one piece.

use super::responder::{BodyRewriter, Relay, RelayOutcome, Responder};
use crate::buffers;
use crate::http1::response::Framing;
use crate::http1::write::{self, FramingLine};
use crate::upstream::{BodyShape, UpstreamError, UpstreamResponse};

/// The last chunk, which says that the answer is whole.
const FINAL: &[u8] = b"0\r\n\r\n";

pub(super) async fn run(
    responder: &mut Responder,
    mut upstream: UpstreamResponse,
    mut relay: Relay<'_>,
) -> RelayOutcome {
    if responder.started() {
        return RelayOutcome::ClientGone;
    }
    let (shape, line) = framing_towards(responder, &upstream);
    let delimited = matches!(upstream.framing(), Framing::Nothing) || line != FramingLine::None;
    let after = responder.after(delimited);
    let mut out = buffers::take_large();
    write::relayed_head(&mut out, upstream.status, &upstream.head, (relay.remove, relay.set), line, after);
    let head_bytes = out.len();
    // What came with the head goes out with it, in one write.
    if upstream.has_buffered() {
        match upstream.next_piece(shape, &mut *relay.observer).await {
            Ok(Some(piece)) => {
                out.extend_from_slice(&piece);
                buffers::give(piece);
            }
            Ok(None) => {}
            Err(error) => return RelayOutcome::UpstreamFailed(error),
        }
    }
    let unfinished = ended_unfinished(&mut out, head_bytes, shape, &upstream, &relay);
    responder.begin();
    if responder.client.write_pooled(out).await.is_err() {
        return RelayOutcome::ClientGone;
    }
    relay.observer.passed_on();
    if let Some(at_boundary) = unfinished {
        let error = upstream.unfinished();
        return Box::pin(cut(responder, at_boundary, &mut relay, error)).await;
    }
    loop {
        match upstream.next_piece(shape, &mut *relay.observer).await {
            Ok(Some(mut piece)) => {
                let unfinished = ended_unfinished(&mut piece, 0, shape, &upstream, &relay);
                if responder.client.write_pooled(piece).await.is_err() {
                    return RelayOutcome::ClientGone;
                }
                relay.observer.passed_on();
                if let Some(at_boundary) = unfinished {
                    let error = upstream.unfinished();
                    return Box::pin(cut(responder, at_boundary, &mut relay, error)).await;
                }
            }
            Ok(None) => {
                responder.complete();
                return RelayOutcome::Complete;
            }
            Err(error) => {
                let at_boundary = is_at_boundary(shape, &upstream);
                return Box::pin(cut(responder, at_boundary, &mut relay, error)).await;
            }
        }
    }
}

/// Moves an answer whose body becomes another one. The head goes out with the first piece that has something to say.
pub(super) async fn run_rewritten(
    responder: &mut Responder,
    mut upstream: UpstreamResponse,
    relay: Relay<'_>,
    rewriter: &mut dyn BodyRewriter,
) -> RelayOutcome {
    if responder.started() {
        return RelayOutcome::ClientGone;
    }
    let is_chunked = !responder.http10;
    let line = if is_chunked { FramingLine::Chunked } else { FramingLine::None };
    let after = responder.after(is_chunked);
    let mut out = buffers::take_large();
    write::relayed_head(&mut out, upstream.status, &upstream.head, (relay.remove, relay.set), line, after);
    loop {
        let mut body = Vec::new();
        let end = match upstream.next_piece(BodyShape::Plain, &mut *relay.observer).await {
            Ok(Some(piece)) => {
                rewriter.rewrite(&piece, &mut body);
                buffers::give(piece);
                None
            }
            Ok(None) => {
                let is_whole = rewriter.end(&mut body) && relay.observer.is_whole();
                Some(if is_whole { Ok(()) } else { Err(upstream.unfinished()) })
            }
            Err(error) => {
                rewriter.end(&mut body);
                Some(Err(error))
            }
        };
        if end.is_some() || !body.is_empty() {
            if out.is_empty() {
                out = buffers::take_large();
            }
            push_piece(&mut out, &body, is_chunked);
            if is_chunked && matches!(end, Some(Ok(()))) {
                out.extend_from_slice(FINAL);
            }
            responder.begin();
            // No buffer stays behind: the next piece may be long in coming.
            if responder.client.write_pooled(std::mem::take(&mut out)).await.is_err() {
                return RelayOutcome::ClientGone;
            }
        }
        match end {
            None => {}
            Some(Ok(())) => {
                responder.complete();
                return RelayOutcome::Complete;
            }
            Some(Err(error)) => {
                if !body.is_empty() {
                    responder.end_is_told();
                }
                return RelayOutcome::UpstreamFailed(error);
            }
        }
    }
}

/// Appends payload in the framing of an answer of our own making; nothing for nothing.
fn push_piece(out: &mut Vec<u8>, payload: &[u8], is_chunked: bool) {
    if payload.is_empty() {
        return;
    }
    if is_chunked {
        write::chunk_start(out, payload.len());
    }
    out.extend_from_slice(payload);
    if is_chunked {
        out.extend_from_slice(b"\r\n");
    }
}

/// Framing of the pieces, and the head's line that announces it. HTTP/1.0 clients do not know chunks.
fn framing_towards(responder: &Responder, upstream: &UpstreamResponse) -> (BodyShape, FramingLine) {
    let declared = match upstream.content_length() {
        Some(length) if upstream.status != http::StatusCode::NO_CONTENT => FramingLine::ContentLength(length),
        _ => FramingLine::None,
    };
    match (upstream.framing(), responder.http10) {
        (Framing::Nothing | Framing::Length(_), _) => (BodyShape::AsIs, declared),
        (Framing::Chunked(_), false) => (BodyShape::AsIs, FramingLine::Chunked),
        (Framing::Chunked(_), true) => (BodyShape::Plain, FramingLine::None),
        (Framing::Close { .. }, false) => (BodyShape::Chunks, FramingLine::Chunked),
        (Framing::Close { .. }, true) => (BodyShape::AsIs, FramingLine::None),
    }
}

/// Whether the body, which begins at `start` of the piece, has ended without being whole; if so, whether a chunk may still
/// follow. The final chunk is then kept from the client. Where its first bytes went out with an earlier piece the rest is
/// kept, so that the message has no end.
fn ended_unfinished(
    piece: &mut Vec<u8>,
    start: usize,
    shape: BodyShape,
    upstream: &UpstreamResponse,
    relay: &Relay<'_>,
) -> Option<bool> {
    if !upstream.framing().is_done() || relay.observer.is_whole() {
        return None;
    }
    match (shape, upstream.framing()) {
        (BodyShape::Chunks, _) | (BodyShape::AsIs, Framing::Chunked(_)) => {
            let final_chunk = final_chunk_in(&piece[start..]);
            piece.truncate(start + final_chunk.unwrap_or(0));
            Some(final_chunk.is_some())
        }
        // Bytes without framing: anything may follow, up to the connection's end.
        (_, Framing::Close { .. } | Framing::Chunked(_)) => Some(true),
        _ => Some(false),
    }
}

/// Where the final chunk begins that these bytes end with; absent where it has begun before them. Its size line may have more
/// zeros than one, and extensions.
fn final_chunk_in(body: &[u8]) -> Option<usize> {
    let line_end = body.len().checked_sub(4).filter(|end| body[*end..] == *b"\r\n\r\n")?;
    match memchr::memrchr(b'\n', &body[..line_end]) {
        Some(line_break) => Some(line_break + 1),
        None => (body == FINAL).then_some(0),
    }
}

/// Whether a piece of our own may follow what has gone out so far.
fn is_at_boundary(shape: BodyShape, upstream: &UpstreamResponse) -> bool {
    match (shape, upstream.framing()) {
        (BodyShape::Plain | BodyShape::Chunks, _) | (BodyShape::AsIs, Framing::Close { .. }) => true,
        (BodyShape::AsIs, _) => upstream.is_at_chunk_boundary(),
    }
}

/// The upstream failed inside the body. Whatever is still sent, the answer stays visibly incomplete: the responder does
/// not become complete, so the connection closes without a final chunk or before the announced length.
#[cold]
async fn cut(
    responder: &mut Responder,
    at_boundary: bool,
    relay: &mut Relay<'_>,
    error: UpstreamError,
) -> RelayOutcome {
    if relay.observer.has_ended() {
        responder.end_is_told();
        return RelayOutcome::UpstreamFailed(error);
    }
    let Some(notice) = relay.cut_notice.take().filter(|_| at_boundary) else {
        return RelayOutcome::UpstreamFailed(error);
    };
    let mut out = buffers::take_large();
    push_piece(&mut out, &notice, !responder.http10);
    if responder.client.write_pooled(out).await.is_err() {
        return RelayOutcome::ClientGone;
    }
    responder.end_is_told();
    RelayOutcome::UpstreamFailed(error)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::pin::pin;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use http::Method;

    use super::*;
    use crate::config::{DriverChoice, Limits, UpstreamConfig};
    use crate::connection::client::Client;
    use crate::connection::{IgnoreBody, Responder};
    use crate::net::runtime::ShardRuntime;
    use crate::net::{self, Stream};
    use crate::shard::Shard;
    use crate::stats::ShardCounters;
    use crate::upstream::{Upstream, UpstreamRequest};

    struct AsItCame;

    impl BodyRewriter for AsItCame {
        fn rewrite(&mut self, payload: &[u8], out: &mut Vec<u8>) {
            out.extend_from_slice(payload);
        }

        fn end(&mut self, _: &mut Vec<u8>) -> bool {
            true
        }
    }

    /// Sends an event and nothing more.
    fn silent_upstream(listener: &TcpListener) -> TcpStream {
        let (mut stream, _) = listener.accept().expect("accepts");
        let mut arrived = Vec::new();
        while !arrived.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("a request");
            arrived.extend_from_slice(&byte);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nevent\r\n").expect("sends");
        stream
    }

    #[test]
    fn a_rewritten_stream_that_falls_silent_holds_no_large_buffer() {
        const KEPT: usize = 3;
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("an address");
        let (mut runtime, _) = ShardRuntime::build(DriverChoice::Epoll).expect("epoll builds");
        runtime.block_on(async move {
            let counters = Arc::new(ShardCounters::default());
            let (tls, draining) = (None, Cell::new(false));
            let shard = Rc::new(Shard { limits: Limits::default(), tls, counters: counters.clone(), draining });
            let stream = Stream::connect(address).await.expect("connects");
            let (mut reader, _) = listener.accept().expect("accepts");
            reader.set_nonblocking(true).expect("a socket");
            let client = Rc::new(Client::new(shard, stream));
            let mut responder = Responder::new(client, &Method::GET, false, true);
            let serving = std::thread::spawn(move || silent_upstream(&listener));
            let request = UpstreamRequest {
                address,
                tls: None,
                authority: "",
                method: &Method::GET,
                path_prefix: "",
                target: "/",
                headers: None,
                remove: &[],
                set: &[],
                body: &[],
            };
            let answer = Upstream::new(UpstreamConfig::default(), counters).send(&request).await.expect("an answer");
            let _upstream = serving.join().expect("it serves");
            buffers::clear();
            (0..KEPT).for_each(|_| buffers::give(Vec::with_capacity(buffers::LARGE_BYTES)));

            let relay = Relay { set: &[], remove: &[], observer: &mut IgnoreBody, cut_notice: None };
            let mut rewriter = AsItCame;
            let mut relaying = pin!(run_rewritten(&mut responder, answer, relay, &mut rewriter));
            let (mut seen, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
            while !seen.ends_with(b"5\r\nevent\r\n") {
                assert!(Instant::now() < deadline, "{:?}", String::from_utf8_lossy(&seen));
                assert!(net::timeout(Duration::from_millis(2), relaying.as_mut()).await.is_none(), "it goes on");
                let read = reader.read_to_end(&mut seen);
                assert!(read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
            }
            // Whatever was written when the client got it has been taken note of.
            assert!(net::timeout(Duration::from_millis(2), relaying.as_mut()).await.is_none(), "it goes on");
            assert_eq!(buffers::large_kept(), KEPT);
        });
    }
}
