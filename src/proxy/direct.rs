//! Workers that a gateway in front has chosen (`--router-mode direct`), read from two request headers. Never picks;
//! without the headers nothing is restricted. In auto mode the headers are a client's fancy: ignored and not passed on.

use http::HeaderName;
use infera_shards::Head;

use super::shared::RouterMode;
use crate::api::ApiError;
use crate::fleet::Fleet;
use crate::worker::Role;

/// The worker that answers: mixed, or the decode half of a pair.
pub(super) const WORKER: HeaderName = HeaderName::from_static("x-worker-instance-id");
/// The prefill half.
pub(super) const PREFILL: HeaderName = HeaderName::from_static("x-prefill-instance-id");

/// Longest worker id, bytes.
const ID_BYTES_MAX: usize = 256;

/// The named workers, as ids; absent without the header or outside of direct mode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Named {
    pub worker: Option<String>,
    pub prefill: Option<String>,
}

impl Named {
    /// # Errors
    /// 400 for a header that is no worker id or given twice, 503 for a worker that is not routable here.
    pub fn of(mode: RouterMode, head: &Head, fleet: &Fleet) -> Result<Self, ApiError> {
        if mode == RouterMode::Auto {
            return Ok(Self::default());
        }
        Ok(Self { worker: read(head, &WORKER, fleet)?, prefill: read(head, &PREFILL, fleet)? })
    }

    pub fn of_role(&self, role: Role) -> Option<&str> {
        match role {
            Role::Prefill => self.prefill.as_deref(),
            Role::Mixed | Role::Decode => self.worker.as_deref(),
        }
    }

    /// Role of the answering worker.
    pub fn role(&self, fleet: &Fleet) -> Option<Role> {
        let id = self.worker.as_deref()?;
        let target = fleet.targets.iter().find(|target| *target.worker.id == *id)?;
        Some(target.worker.record.disagg_mode)
    }
}

/// The part of `pool` that belongs to the worker.
pub(super) fn narrowed(fleet: &Fleet, pool: &[u32], id: &str, model: &str) -> Result<Vec<u32>, ApiError> {
    let kept: Vec<u32> =
        pool.iter().copied().filter(|index| *fleet.targets[*index as usize].worker.id == *id).collect();
    match kept.is_empty() {
        false => Ok(kept),
        true => Err(ApiError::NoWorker { reason: format!("worker {id} does not serve model={model:?} in this place") }),
    }
}

fn read(head: &Head, name: &HeaderName, fleet: &Fleet) -> Result<Option<String>, ApiError> {
    let malformed = |what: &str| ApiError::BadRequest(format!("{name} {what}"));
    let mut values = head.get_all(name.as_str());
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(malformed("is given twice"));
    }
    let id = std::str::from_utf8(value).map(str::trim).map_err(|_| malformed("is not text"))?;
    // Some gateways name a rank as well; which rank of its worker serves is decided here.
    let id = id.split_once("#dp").map_or(id, |(id, _)| id);
    if fleet.targets.iter().any(|target| *target.worker.id == *id) {
        return Ok(Some(id.to_owned()));
    }
    if !is_worker_id(id) {
        return Err(malformed("is not a worker id (host:port)"));
    }
    Err(ApiError::NoWorker {
        reason: format!("{name}: worker {id} is not known or not active; the routing in front may be stale"),
    })
}

fn is_worker_id(id: &str) -> bool {
    let Some((host, port)) = id.rsplit_once(':') else { return false };
    let host_is_plain =
        !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte));
    id.len() <= ID_BYTES_MAX && host_is_plain && port.parse::<u16>().is_ok_and(|port| port > 0)
}

#[cfg(test)]
mod tests {
    use super::is_worker_id;

    #[test]
    fn a_worker_id_is_host_and_port() {
        for id in ["10.0.0.1:30000", "node-7.rack_2:1", "[fd00::5]:8000"] {
            assert!(is_worker_id(id), "{id}");
        }
        for id in
            ["", "garbage", "host:", ":80", "host:port", "host:70000", "a b:80", "a,b:80", "http://a:80", "host:0"]
        {
            assert!(!is_worker_id(id), "{id}");
        }
        assert!(!is_worker_id(&format!("{}:80", "x".repeat(300))));
    }
}
