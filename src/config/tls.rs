//! Options of TLS: what the listener shows, whom it wants to see, and whose certificates are believed in workers and etcd.
//! Files are read once, at start; no text that is made here holds anything of a key.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use clap::Args;
use infera_shards::{ClientTls, ServerTls};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};

use super::validate::Problems;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "TLS")]
pub struct TlsArgs {
    /// Certificate chain of the listener (PEM, its own certificate first). With it the main port speaks TLS only;
    /// --admin-listen stays plain.
    #[arg(long, value_name = "PATH", env = "INFERA_TLS_CERT_FILE")]
    pub tls_cert_file: Option<PathBuf>,
    /// Private key of that certificate (PEM: PKCS#8, PKCS#1 or SEC1, not encrypted).
    #[arg(long, value_name = "PATH", env = "INFERA_TLS_KEY_FILE")]
    pub tls_key_file: Option<PathBuf>,
    /// Certificate authorities (PEM); clients must then show a certificate of one of them.
    #[arg(long, value_name = "PATH", env = "INFERA_TLS_CLIENT_CA_FILE")]
    pub tls_client_ca_file: Option<PathBuf>,
    /// Certificate authorities (PEM) for https:// workers [default: the system's].
    #[arg(long, value_name = "PATH", env = "INFERA_WORKER_TLS_CA_FILE")]
    pub worker_tls_ca_file: Option<PathBuf>,
    /// true|false: believe any certificate of https:// workers; whoever is on the way can then read and change everything.
    #[arg(
        long,
        value_name = "BOOL",
        env = "INFERA_WORKER_TLS_INSECURE_SKIP_VERIFY",
        default_value = "false",
        num_args = 0..=1,
        default_missing_value = "true",
        action = clap::ArgAction::Set
    )]
    pub worker_tls_insecure_skip_verify: bool,
    /// Certificate authorities (PEM) for https:// endpoints of etcd [default: the system's].
    #[arg(long, value_name = "PATH", env = "INFERA_ETCD_TLS_CA_FILE")]
    pub etcd_tls_ca_file: Option<PathBuf>,
}

/// What the options say, with the files read.
#[derive(Clone, Debug)]
pub struct Tls {
    /// Absent: the listener speaks plain HTTP.
    pub listener: Option<ServerTls>,
    pub workers: ClientTls,
}

pub(super) fn settings(arguments: &TlsArgs, problems: &mut Problems) -> Tls {
    Tls { listener: listener(arguments, problems), workers: workers(arguments, problems) }
}

/// Things the operator should know. `has_secure_worker`: the command line names an `https` worker.
pub(super) fn warnings(arguments: &TlsArgs, has_secure_worker: bool) -> Vec<String> {
    let mut warnings = Vec::new();
    if arguments.worker_tls_insecure_skip_verify {
        warnings.push(
            "--worker-tls-insecure-skip-verify: certificates of https workers are NOT checked; prompts, answers and keys \
             can be read and changed by whoever is on the way to them"
                .to_owned(),
        );
    } else if has_secure_worker && arguments.worker_tls_ca_file.is_none() && system_roots().is_empty() {
        warnings.push(
            "this system has no certificate authorities, so no https worker can be reached; install ca-certificates or \
             give --worker-tls-ca-file"
                .to_owned(),
        );
    }
    warnings
}

fn listener(arguments: &TlsArgs, problems: &mut Problems) -> Option<ServerTls> {
    let (certificates, key) = match (&arguments.tls_cert_file, &arguments.tls_key_file) {
        (None, None) => {
            if arguments.tls_client_ca_file.is_some() {
                problems.add("--tls-client-ca-file needs --tls-cert-file and --tls-key-file");
            }
            return None;
        }
        (Some(certificates), Some(key)) => (certificates, key),
        _ => {
            problems.add("--tls-cert-file and --tls-key-file belong together; give both or none");
            return None;
        }
    };
    let chain = read_certificates("--tls-cert-file", certificates, problems);
    let key = read_key("--tls-key-file", key, problems);
    let client_roots = match &arguments.tls_client_ca_file {
        Some(path) => Some(read_roots("--tls-client-ca-file", path, problems)?),
        None => None,
    };
    let listener = ServerTls::new(chain?, key?, client_roots);
    listener.map_err(|error| problems.add(format!("--tls-cert-file with --tls-key-file: {error}"))).ok()
}

fn workers(arguments: &TlsArgs, problems: &mut Problems) -> ClientTls {
    match (&arguments.worker_tls_ca_file, arguments.worker_tls_insecure_skip_verify) {
        (Some(_), true) => {
            problems.add("--worker-tls-ca-file contradicts --worker-tls-insecure-skip-verify; drop one of them");
            ClientTls::default()
        }
        (None, true) => ClientTls::without_verification(),
        (path, false) => ClientTls::new(roots("--worker-tls-ca-file", path.as_deref(), problems)),
    }
}

/// The authorities of a file, or the system's without one.
pub(super) fn roots(flag: &str, path: Option<&Path>, problems: &mut Problems) -> Arc<RootCertStore> {
    match path {
        Some(path) => Arc::new(read_roots(flag, path, problems).unwrap_or_else(RootCertStore::empty)),
        None => system_roots(),
    }
}

/// Where the system keeps them, or `SSL_CERT_FILE` and `SSL_CERT_DIR` say. What cannot be read there is left out.
fn system_roots() -> Arc<RootCertStore> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    let read = || {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        Arc::new(roots)
    };
    ROOTS.get_or_init(read).clone()
}

fn read_roots(flag: &str, path: &Path, problems: &mut Problems) -> Option<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(flag, path, problems)? {
        if let Err(error) = roots.add(certificate) {
            problems.add(format!("{flag} {}: {error}", path.display()));
            return None;
        }
    }
    Some(roots)
}

/// At least one.
fn read_certificates(flag: &str, path: &Path, problems: &mut Problems) -> Option<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(certificates) if !certificates.is_empty() => return Some(certificates),
        Ok(_) => problems.add(format!("{flag} {}: no certificate in it; give a PEM file", path.display())),
        Err(error) => problems.add(format!("{flag} {}: {}", path.display(), describe(&error))),
    }
    None
}

fn read_key(flag: &str, path: &Path, problems: &mut Problems) -> Option<PrivateKeyDer<'static>> {
    let read = PrivateKeyDer::from_pem_file(path);
    read.map_err(|error| problems.add(format!("{flag} {}: {}", path.display(), describe(&error)))).ok()
}

/// Never a piece of the file: it may be a key, also where it should not.
fn describe(error: &pem::Error) -> String {
    match error {
        pem::Error::Io(error) => error.to_string(),
        pem::Error::NoItemsFound => "nothing of the kind in it (an encrypted key is not understood)".to_owned(),
        _ => "not a PEM file".to_owned(),
    }
}

#[cfg(test)]
#[path = "tls_tests.rs"]
mod tests;
