//! How TLS is set up on either side: provider, protocol versions, ALPN, session resumption. It owns no socket and reads no
//! file; certificates and roots come parsed. Keys are never logged, and key logging for debuggers is not wired up.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, ConfigBuilder, Connection, DigitallySignedStruct, RootCertStore, ServerConfig,
    ServerConnection, SignatureScheme, WantsVerifier,
};

/// The one protocol that is spoken inside.
const ALPN: &[u8] = b"http/1.1";
/// Peers whose sessions a shard remembers, so that the next connection to one needs no signature.
const SESSIONS_PER_SHARD: usize = 1024;

/// Why certificates, key or roots cannot be used. The text is for the operator and has no key material in it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(String);

impl TlsError {
    fn of(error: impl fmt::Display) -> TlsError {
        TlsError(error.to_string())
    }
}

/// What a TLS listener shows to its clients. Clones share one cell, so that [`ServerTls::replace`] reaches every shard.
#[derive(Clone)]
pub struct ServerTls(Arc<ArcSwap<ServerConfig>>);

impl ServerTls {
    /// `chain` begins with the listener's own certificate, which `key` belongs to. With `client_roots` a client must show
    /// a certificate that leads to one of them.
    ///
    /// # Errors
    /// [`TlsError`] when key and certificate do not belong together, or one of them cannot be used.
    pub fn new(
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        client_roots: Option<RootCertStore>,
    ) -> Result<ServerTls, TlsError> {
        let provider = provider();
        let builder = ServerConfig::builder_with_provider(provider.clone());
        let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::of)?;
        let builder = match client_roots {
            None => builder.with_no_client_auth(),
            Some(roots) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                builder.with_client_cert_verifier(verifier.build().map_err(TlsError::of)?)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(TlsError::of)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // Tickets instead of a cache: whichever shard a client comes back to can read them, and none waits for another.
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.ticketer = ring::Ticketer::new().map_err(TlsError::of)?;
        Ok(ServerTls(Arc::new(ArcSwap::from_pointee(config))))
    }

    /// From now on new connections are shown what `other` shows. Tickets given out before are void.
    pub fn replace(&self, other: &ServerTls) {
        self.0.store(other.0.load_full());
    }

    pub(crate) fn accept(&self) -> Result<Connection, TlsError> {
        ServerConnection::new(self.0.load_full()).map(Connection::from).map_err(TlsError::of)
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("ServerTls")
    }
}

/// How the certificates of upstreams are judged. The default trusts nobody.
#[derive(Clone)]
pub struct ClientTls(Arc<ClientConfig>);

impl ClientTls {
    /// An upstream must show a certificate that leads to one of `roots` and is for the name or address it was called by.
    pub fn new(roots: Arc<RootCertStore>) -> ClientTls {
        ClientTls::finish(ClientTls::builder().with_root_certificates(roots).with_no_client_auth())
    }

    /// Any certificate will do: whoever sits between here and an upstream can read and change everything.
    pub fn without_verification() -> ClientTls {
        let verifier = Arc::new(TrustAnyone(provider().signature_verification_algorithms));
        let builder = ClientTls::builder().dangerous().with_custom_certificate_verifier(verifier);
        ClientTls::finish(builder.with_no_client_auth())
    }

    fn builder() -> ConfigBuilder<ClientConfig, WantsVerifier> {
        let builder = ClientConfig::builder_with_provider(provider());
        builder.with_safe_default_protocol_versions().expect("the provider has TLS 1.2 and 1.3")
    }

    fn finish(mut config: ClientConfig) -> ClientTls {
        config.alpn_protocols = vec![ALPN.to_vec()];
        ClientTls(Arc::new(config))
    }

    /// The same judgement for other clients of this process.
    pub fn config(&self) -> ClientConfig {
        (*self.0).clone()
    }

    /// The same with a memory of sessions of its own: that memory is behind a lock, which shards do not share.
    pub(crate) fn of_shard(&self) -> ClientTls {
        let mut config = self.config();
        config.resumption = Resumption::in_memory_sessions(SESSIONS_PER_SHARD);
        ClientTls(Arc::new(config))
    }

    pub(crate) fn connect(&self, name: &TlsName) -> Result<Connection, TlsError> {
        let name = (*name.0).clone();
        ClientConnection::new(self.0.clone(), name).map(Connection::from).map_err(TlsError::of)
    }
}

impl Default for ClientTls {
    fn default() -> ClientTls {
        ClientTls::new(Arc::new(RootCertStore::empty()))
    }
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("ClientTls")
    }
}

/// The DNS name or IP address that an upstream's certificate must be for; a name is also sent as SNI. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsName(Arc<ServerName<'static>>);

impl TlsName {
    /// From a host as in a URL, IPv6 without brackets; `None` when no certificate can be for it.
    pub fn parse(host: &str) -> Option<TlsName> {
        ServerName::try_from(host.to_owned()).ok().map(|name| TlsName(Arc::new(name)))
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Checks that the peer has the key of the certificate it shows, and nothing about that certificate.
#[derive(Debug)]
struct TrustAnyone(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for TrustAnyone {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}
