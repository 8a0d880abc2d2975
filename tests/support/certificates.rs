//! Certificates for tests: an authority made on the spot, what it issues, and TLS peers that use them over std sockets.

// Each test program uses a part of it.
#![allow(dead_code)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose, date_time_ymd};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned};

/// Signs certificates; nobody outside of the test knows it.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: rcgen::Certificate,
}

/// A certificate with its key.
pub struct Issued {
    certificate: rcgen::Certificate,
    key: KeyPair,
}

impl Authority {
    pub fn new() -> Authority {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        // Of two authorities with one name, one would look like a forger of the other.
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        params.distinguished_name.push(DnType::CommonName, format!("authority {number}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        Authority { issuer: Issuer::new(params, key), certificate }
    }

    /// For these DNS names and IP addresses.
    pub fn issue(&self, names: &[&str]) -> Issued {
        self.issue_changed(names, |_| {})
    }

    pub fn issue_expired(&self, names: &[&str]) -> Issued {
        self.issue_changed(names, |params| params.not_after = date_time_ymd(2020, 1, 1))
    }

    fn issue_changed(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Issued {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("names");
        change(&mut params);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        Issued { certificate, key }
    }

    pub fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.der().clone()).expect("an authority");
        roots
    }

    pub fn pem(&self) -> String {
        self.certificate.pem()
    }
}

impl Issued {
    pub fn chain(&self) -> Vec<CertificateDer<'static>> {
        vec![self.certificate.der().clone()]
    }

    pub fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::try_from(self.key.serialize_der()).expect("a key")
    }

    pub fn pem(&self) -> String {
        self.certificate.pem()
    }

    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    /// A server that shows it.
    pub fn server(&self) -> Arc<ServerConfig> {
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().expect("versions").with_no_client_auth();
        Arc::new(builder.with_single_cert(self.chain(), self.key()).expect("a server"))
    }
}

/// A client that believes the authority, and shows `own` if it is asked to.
pub fn client(authority: &Authority, own: Option<&Issued>) -> ClientConfig {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().expect("versions");
    let builder = builder.with_root_certificates(authority.roots());
    match own {
        None => builder.with_no_client_auth(),
        Some(own) => builder.with_client_auth_cert(own.chain(), own.key()).expect("a client"),
    }
}

/// TLS over a connection, on the client's side. The handshake runs with the first byte.
pub fn over<S: Read + Write>(
    stream: S,
    config: impl Into<Arc<ClientConfig>>,
    name: &str,
) -> StreamOwned<ClientConnection, S> {
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    StreamOwned::new(ClientConnection::new(config.into(), name).expect("a client"), stream)
}

/// The same on the server's side.
pub fn behind(stream: TcpStream, config: &Arc<ServerConfig>) -> StreamOwned<ServerConnection, TcpStream> {
    StreamOwned::new(ServerConnection::new(config.clone()).expect("a server"), stream)
}
