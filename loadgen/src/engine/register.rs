//! Owns registration in etcd: records under one lease, kept alive, revoked at the end. Never starts engines.
//!
//! Follows the workers of the system this one replaces: TTL 30 s, keepalive every 10 s, a lost lease is replaced by a
//! new registration, and the lease is revoked when the worker leaves.

use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use etcd_client::{Client, PutOptions};
use serde_json::Value;
use tokio::sync::oneshot;

const LEASE_TTL_SECONDS: i64 = 30;
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Where records go.
#[derive(Clone, Debug)]
pub struct EtcdTarget {
    /// `host:port` or `http://host:port`.
    pub endpoint: String,
    /// Key prefix, `/infera/workers/` by default.
    pub prefix: String,
}

/// Live registration; ends, with its lease revoked, when dropped ([`Registration::abandon`]: without).
pub struct Registration {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Registration {
    /// Registers `records` (each with its `worker_id`). The first registration must succeed; later trouble is
    /// retried until the end.
    pub fn start(target: EtcdTarget, records: Vec<Value>) -> Result<Registration> {
        let (stop, stopped) = oneshot::channel();
        let (ready, first) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name("registration".into()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            match runtime {
                Ok(runtime) => runtime.block_on(keep_registered(target, records, stopped, ready)),
                Err(error) => drop(ready.send(Err(error.into()))),
            }
        })?;
        let registration = Registration { stop: Some(stop), thread: Some(thread) };
        first.recv().context("the registration thread ended")??;
        Ok(registration)
    }

    /// Ends without taking anything back, as a process that is killed: the record goes when its lease has run out.
    pub fn abandon(mut self) {
        if let Some(stop) = self.stop.take() {
            // An error means that the thread has ended already.
            let _ = stop.send(());
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the registration thread panicked");
        }
    }
}

async fn keep_registered(
    target: EtcdTarget,
    records: Vec<Value>,
    mut stopped: oneshot::Receiver<()>,
    ready: std::sync::mpsc::Sender<Result<()>>,
) {
    let mut session = match register(&target, &records).await {
        Ok(session) => session,
        Err(error) => return drop(ready.send(Err(error))),
    };
    let _ = ready.send(Ok(()));
    loop {
        tokio::select! {
            told = &mut stopped => {
                if told.is_ok() {
                    return;
                }
                break;
            }
            _ = tokio::time::sleep(KEEPALIVE_EVERY) => {}
        }
        while let Err(error) = session.keep_alive().await {
            tracing::warn!(%error, "lease lost, registering again");
            tokio::select! {
                _ = &mut stopped => return,
                _ = tokio::time::sleep(RETRY_AFTER) => {}
            }
            if let Ok(fresh) = register(&target, &records).await {
                session = fresh;
            }
        }
    }
    let revoked = tokio::time::timeout(Duration::from_secs(5), session.client.lease_revoke(session.lease)).await;
    if !matches!(revoked, Ok(Ok(_))) {
        tracing::warn!("lease not revoked, it ends by itself");
    }
}

struct Session {
    client: Client,
    lease: i64,
}

impl Session {
    async fn keep_alive(&mut self) -> Result<()> {
        let (mut keeper, mut replies) = self.client.lease_keep_alive(self.lease).await?;
        keeper.keep_alive().await?;
        let reply =
            tokio::time::timeout(KEEPALIVE_EVERY, replies.message()).await??.context("keepalive stream ended")?;
        anyhow::ensure!(reply.ttl() > 0, "lease expired");
        Ok(())
    }
}

async fn register(target: &EtcdTarget, records: &[Value]) -> Result<Session> {
    let connect = Client::connect([target.endpoint.as_str()], None);
    let within = tokio::time::timeout(Duration::from_secs(5), connect).await;
    let mut client = within.context("etcd does not answer")?.with_context(|| format!("etcd at {}", target.endpoint))?;
    let lease = client.lease_grant(LEASE_TTL_SECONDS, None).await?.id();
    for record in records {
        let id = record["worker_id"].as_str().context("a record has a worker_id")?;
        let key = format!("{}/{id}", target.prefix.trim_end_matches('/'));
        client.put(key, record.to_string(), Some(PutOptions::new().with_lease(lease))).await?;
    }
    Ok(Session { client, lease })
}
