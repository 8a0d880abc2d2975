//! Moves an upstream's answer to the client. It owns the choice of framing towards the client and the rule that a cut
//! answer is never finished politely; it never holds more than one piece.

use super::client::ClientGone;
use super::responder::{Relay, RelayOutcome, Responder};
use crate::buffers;
use crate::http1::response::Framing;
use crate::http1::write::{self, FramingLine};
use crate::upstream::{BodyShape, UpstreamError, UpstreamResponse};

pub(super) async fn run(
    responder: &mut Responder,
    mut upstream: UpstreamResponse,
    mut relay: Relay<'_>,
) -> RelayOutcome {
    let (shape, line) = framing_towards(responder, &upstream);
    let delimited = matches!(upstream.framing(), Framing::Nothing) || line != FramingLine::None;
    let after = responder.after(delimited);
    let mut out = buffers::take_large();
    write::relayed_head(&mut out, upstream.status, &upstream.head, (relay.remove, relay.set), line, after);
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
    responder.begin();
    match responder.client.write_all(out).await {
        Ok(out) => buffers::give(out),
        Err(ClientGone) => return RelayOutcome::ClientGone,
    }
    loop {
        match upstream.next_piece(shape, &mut *relay.observer).await {
            Ok(Some(piece)) => match responder.client.write_all(piece).await {
                Ok(piece) => buffers::give(piece),
                Err(ClientGone) => return RelayOutcome::ClientGone,
            },
            Ok(None) => {
                responder.complete();
                return RelayOutcome::Complete;
            }
            Err(error) => return cut(responder, &upstream, relay.cut_notice.take(), error).await,
        }
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

/// The upstream failed inside the body. Whatever is still sent, the answer stays visibly incomplete: the responder does
/// not become complete, so the connection closes without a final chunk or before the announced length.
#[cold]
async fn cut(
    responder: &mut Responder,
    upstream: &UpstreamResponse,
    notice: Option<bytes::Bytes>,
    error: UpstreamError,
) -> RelayOutcome {
    let Some(notice) = notice else { return RelayOutcome::UpstreamFailed(error) };
    if !upstream.is_at_chunk_boundary() {
        return RelayOutcome::UpstreamFailed(error);
    }
    let mut out = buffers::take_large();
    if responder.http10 {
        out.extend_from_slice(&notice);
    } else {
        write::chunk_start(&mut out, notice.len());
        out.extend_from_slice(&notice);
        out.extend_from_slice(b"\r\n");
    }
    match responder.client.write_all(out).await {
        Ok(out) => buffers::give(out),
        Err(ClientGone) => return RelayOutcome::ClientGone,
    }
    RelayOutcome::UpstreamFailed(error)
}
