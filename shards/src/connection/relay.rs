//! Moves an upstream's answer to the client. It owns the choice of framing towards the client and the rule that a cut
//! answer is never finished politely; it never holds more than one piece.

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
    if responder.started() {
        return RelayOutcome::ClientGone;
    }
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
    let unfinished = ended_unfinished(&mut out, shape, &upstream, &relay);
    responder.begin();
    if responder.client.write_pooled(out).await.is_err() {
        return RelayOutcome::ClientGone;
    }
    relay.observer.passed_on();
    if let Some(at_boundary) = unfinished {
        let error = upstream.unfinished();
        return Box::pin(cut(responder, at_boundary, notice(&mut relay), error)).await;
    }
    loop {
        match upstream.next_piece(shape, &mut *relay.observer).await {
            Ok(Some(mut piece)) => {
                let unfinished = ended_unfinished(&mut piece, shape, &upstream, &relay);
                if responder.client.write_pooled(piece).await.is_err() {
                    return RelayOutcome::ClientGone;
                }
                relay.observer.passed_on();
                if let Some(at_boundary) = unfinished {
                    let error = upstream.unfinished();
                    return Box::pin(cut(responder, at_boundary, notice(&mut relay), error)).await;
                }
            }
            Ok(None) => {
                responder.complete();
                return RelayOutcome::Complete;
            }
            Err(error) => {
                let at_boundary = upstream.is_at_chunk_boundary();
                return Box::pin(cut(responder, at_boundary, notice(&mut relay), error)).await;
            }
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

/// Whether the body has ended without being whole; if so, whether a chunk may still follow. The final chunk is then kept
/// from the client. Where its first bytes went out with an earlier piece the rest is kept, so that the message has no end.
fn ended_unfinished(
    piece: &mut Vec<u8>,
    shape: BodyShape,
    upstream: &UpstreamResponse,
    relay: &Relay<'_>,
) -> Option<bool> {
    const FINAL: &[u8] = b"0\r\n\r\n";
    if !upstream.framing().is_done() || relay.observer.is_whole() {
        return None;
    }
    let chunked = match (shape, upstream.framing()) {
        (BodyShape::Chunks, _) | (BodyShape::AsIs, Framing::Chunked(_)) => true,
        // Bytes without framing: anything may follow, up to the connection's end.
        (_, Framing::Close { .. } | Framing::Chunked(_)) => return Some(true),
        _ => false,
    };
    let ends = chunked && piece.ends_with(FINAL);
    if ends {
        piece.truncate(piece.len() - FINAL.len());
    } else if chunked {
        piece.clear();
    }
    Some(ends)
}

/// What the client is told of a cut: nothing where the answer has told it already.
fn notice(relay: &mut Relay<'_>) -> Option<bytes::Bytes> {
    relay.cut_notice.take().filter(|_| !relay.observer.has_ended())
}

/// The upstream failed inside the body. Whatever is still sent, the answer stays visibly incomplete: the responder does
/// not become complete, so the connection closes without a final chunk or before the announced length.
#[cold]
async fn cut(
    responder: &mut Responder,
    at_boundary: bool,
    notice: Option<bytes::Bytes>,
    error: UpstreamError,
) -> RelayOutcome {
    let Some(notice) = notice else { return RelayOutcome::UpstreamFailed(error) };
    if !at_boundary {
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
    if responder.client.write_pooled(out).await.is_err() {
        return RelayOutcome::ClientGone;
    }
    RelayOutcome::UpstreamFailed(error)
}
