//! Results from other threads to one shard. All of them pass through one channel that the shard's main task empties,
//! because in this runtime only a task that lives as long as its shard may be woken from another thread.
//!
//! It owns tickets (one awaited result each) and the engine's commands, and never blocks either side. The channel has
//! no cap of its own: it holds at most one message per outstanding ticket.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

pub(crate) enum Message {
    /// The ticket's result; `None` when its completion was dropped.
    Completed(u64, Option<Box<dyn Any + Send>>),
    Drain,
    Stop,
}

pub(crate) type Sender = async_channel::Sender<Message>;
pub(crate) type Receiver = async_channel::Receiver<Message>;

enum Waiting {
    Open(Option<Waker>),
    Arrived(Option<Box<dyn Any + Send>>),
}

#[derive(Default)]
struct Tickets {
    next: Cell<u64>,
    waiting: RefCell<HashMap<u64, Waiting>>,
}

/// One shard's place for results of other threads.
#[derive(Clone)]
pub struct Mailbox {
    sender: Sender,
    tickets: Rc<Tickets>,
}

impl Mailbox {
    pub(crate) fn new(sender: Sender) -> Mailbox {
        Mailbox { sender, tickets: Rc::default() }
    }

    /// A pair for one result: `Completion` goes to the other thread, `Pending` is awaited here.
    pub fn ticket<T: Send + 'static>(&self) -> (Completion<T>, Pending<T>) {
        let id = self.tickets.next.get();
        self.tickets.next.set(id + 1);
        self.tickets.waiting.borrow_mut().insert(id, Waiting::Open(None));
        let completion = Completion { id, sender: Some(self.sender.clone()), result: PhantomData };
        (completion, Pending { id, tickets: self.tickets.clone(), result: PhantomData })
    }

    /// Hands a result over to whoever awaits it; nobody may, any more.
    pub(crate) fn deliver(&self, id: u64, result: Option<Box<dyn Any + Send>>) {
        let before = match self.tickets.waiting.borrow_mut().get_mut(&id) {
            Some(waiting) => std::mem::replace(waiting, Waiting::Arrived(result)),
            None => return,
        };
        if let Waiting::Open(Some(waker)) = before {
            waker.wake();
        }
    }
}

/// The sending half of a ticket. Dropped unused, it resolves the other half to `None`.
pub struct Completion<T> {
    id: u64,
    sender: Option<Sender>,
    result: PhantomData<fn(T)>,
}

impl<T: Send + 'static> Completion<T> {
    /// Delivers the result. It is dropped when nobody waits any more or the shard has ended.
    pub fn complete(mut self, result: T) {
        if let Some(sender) = self.sender.take() {
            let _ = sender.try_send(Message::Completed(self.id, Some(Box::new(result))));
        }
    }
}

impl<T> Drop for Completion<T> {
    fn drop(&mut self) {
        if let Some(sender) = self.sender.take() {
            let _ = sender.try_send(Message::Completed(self.id, None));
        }
    }
}

/// The waiting half of a ticket; may be dropped at any time.
pub struct Pending<T> {
    id: u64,
    tickets: Rc<Tickets>,
    result: PhantomData<fn() -> T>,
}

impl<T: 'static> Future for Pending<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let mut waiting = self.tickets.waiting.borrow_mut();
        match waiting.get_mut(&self.id) {
            Some(Waiting::Open(waker)) => {
                *waker = Some(cx.waker().clone());
                Poll::Pending
            }
            Some(Waiting::Arrived(result)) => {
                let result = result.take();
                waiting.remove(&self.id);
                Poll::Ready(result.and_then(|result| result.downcast::<T>().ok()).map(|result| *result))
            }
            None => Poll::Ready(None),
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        // Taken out first: dropping a result may drop another ticket.
        let waiting = self.tickets.waiting.borrow_mut().remove(&self.id);
        drop(waiting);
    }
}
