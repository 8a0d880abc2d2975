//! A shard's table of disaggregation parameters: each registration is parsed and checked once. Never shared.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use hashbrown::HashMap;

use crate::fleet::Worker;
use crate::limits;
use crate::pd::{Peer, PeerError};
use crate::worker::Name;

/// What one registration says, or why it cannot be paired.
pub(super) type KnownPeer = Result<Rc<Peer>, PeerError>;

#[derive(Default)]
pub(super) struct Peers {
    by_worker: RefCell<HashMap<Name, (Arc<Worker>, KnownPeer)>>,
}

impl Peers {
    pub fn of(&self, worker: &Arc<Worker>) -> KnownPeer {
        let mut by_worker = self.by_worker.borrow_mut();
        if let Some((known, peer)) = by_worker.get(&worker.id)
            && Arc::ptr_eq(known, worker)
        {
            return peer.clone();
        }
        // Departed workers are dropped by starting over.
        if by_worker.len() >= limits::PEERS_MAX {
            by_worker.clear();
        }
        let peer = Peer::of(&worker.record).map(Rc::new);
        by_worker.insert(worker.id.clone(), (worker.clone(), peer.clone()));
        peer
    }
}
