#include "lockstep/rendezvous/secure_channel.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <openssl/ssl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"

namespace lockstep {
namespace {

constexpr std::size_t kMinSecretBytes = 16;
constexpr std::size_t kMaxSecretBytes = 4096;
// A ClientHello with one identity has a few hundred bytes.
constexpr std::size_t kMaxHandshakeBytes = 16u << 10;
constexpr char kCipher[] = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kCipherNumber[] = {0x13, 0x01};  // the same, as TLS numbers it
constexpr char kSalt[] = "lockstep launch link 1";

[[noreturn]] void openssl_failed(const char* what) {
  char text[256] = "no reason given";
  if (const unsigned long error = ERR_get_error(); error != 0)
    ERR_error_string_n(error, text, sizeof text);
  throw UsageError("launch", "OpenSSL cannot {} ({}). Check its configuration (OPENSSL_CONF).",
                   what, text);
}

// Checks the descriptor that is read afterwards, so that the file cannot be replaced in between.
void check_access(int fd, const std::string& path) {
  struct stat info {};
  if (::fstat(fd, &info) != 0)
    throw SystemError("launch", fmt::format("cannot examine --secret-file={}", path), errno);
  if (!S_ISREG(info.st_mode))
    throw UsageError("launch", "--secret-file={} is not a regular file.", path);
  if (info.st_uid != ::geteuid() && info.st_uid != 0)
    throw UsageError("launch",
                     "--secret-file={} belongs to user {}, not to this one ({}). Its owner knows "
                     "the secret and can change it. Make a file of your own.",
                     path, info.st_uid, ::geteuid());
  if ((info.st_mode & 077) != 0)
    throw UsageError("launch",
                     "--secret-file={} has mode {:04o}: others on this host may use it. Run: "
                     "chmod 600 {}",
                     path, info.st_mode & 07777, path);
}

SSL_SESSION* session_of(SSL* ssl, const std::array<unsigned char, 32>& key) {
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kCipherNumber);
  SSL_SESSION* session = SSL_SESSION_new();
  if (session == nullptr || cipher == nullptr ||
      SSL_SESSION_set1_master_key(session, key.data(), key.size()) != 1 ||
      SSL_SESSION_set_cipher(session, cipher) != 1 ||
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) != 1) {
    SSL_SESSION_free(session);
    return nullptr;
  }
  return session;
}

}  // namespace

// ---------------------------------------------------------------- SecretKey

SecretKey::SecretKey(std::string_view secret) {
  unsigned int size = 0;
  // HKDF-Extract: the secret may have any length and format.
  if (HMAC(EVP_sha256(), kSalt, sizeof kSalt - 1,
           reinterpret_cast<const unsigned char*>(secret.data()), secret.size(), bytes_.data(),
           &size) == nullptr ||
      size != bytes_.size())
    openssl_failed("compute HMAC-SHA256");
}

SecretKey::~SecretKey() {
  OPENSSL_cleanse(bytes_.data(), bytes_.size());
}

SecretKey SecretKey::from_file(const std::string& path) {
  // O_NONBLOCK: opening a fifo must not block the launcher.
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file)
    throw UsageError("launch",
                     "--secret-file={} cannot be read: {}. Make one with `(umask 077; openssl rand "
                     "-hex 32 > FILE)` and copy it to every host.",
                     path, std::strerror(errno));
  check_access(file.get(), path);
  std::array<char, kMaxSecretBytes + 1> contents;
  std::size_t size = 0;
  while (size < contents.size()) {
    const ssize_t n = ::read(file.get(), contents.data() + size, contents.size() - size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      throw SystemError("launch", fmt::format("cannot read --secret-file={}", path), errno);
    if (n == 0) break;
    size += static_cast<std::size_t>(n);
  }
  std::string secret = trim({contents.data(), size});
  if (size > kMaxSecretBytes || secret.size() < kMinSecretBytes)
    throw UsageError("launch",
                     "--secret-file={} holds {} bytes; a secret has {} to {}. A short one can be "
                     "guessed from a recorded handshake: `openssl rand -hex 32` makes a good one.",
                     path, size > kMaxSecretBytes ? "too many" : std::to_string(secret.size()),
                     kMinSecretBytes, kMaxSecretBytes);
  const SecretKey key(secret);
  OPENSSL_cleanse(contents.data(), contents.size());
  OPENSSL_cleanse(secret.data(), secret.size());
  return key;
}

// ---------------------------------------------------------------- SecureContext

struct SecureContext::Impl {
  Side side;
  SecretKey key;
  std::string identity;
  std::array<unsigned char, 32> decoy_key{};  // for every identity but ours
  SSL_CTX* context = nullptr;

  static Impl* of(SSL* ssl) {
    return static_cast<Impl*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl)));
  }

  static int use_session(SSL* ssl, const EVP_MD* digest, const unsigned char** id,
                         std::size_t* size, SSL_SESSION** session) {
    const Impl& self = *of(ssl);
    *session = nullptr;
    *id = nullptr;
    *size = 0;
    if (digest != nullptr && EVP_MD_get_type(digest) != NID_sha256) return 1;
    *session = session_of(ssl, self.key.bytes());
    if (*session == nullptr) return 0;
    *id = reinterpret_cast<const unsigned char*>(self.identity.data());
    *size = self.identity.size();
    return 1;
  }

  // A foreign identity fails exactly as a wrong key does, so that nobody can find out by trying
  // which run this is.
  static int find_session(SSL* ssl, const unsigned char* id, std::size_t size,
                          SSL_SESSION** session) {
    const Impl& self = *of(ssl);
    const bool ours = std::string_view(reinterpret_cast<const char*>(id), size) == self.identity;
    *session = session_of(ssl, ours ? self.key.bytes() : self.decoy_key);
    return *session != nullptr ? 1 : 0;
  }
};

SecureContext::SecureContext(Side side, SecretKey key, std::string identity)
    : impl_(std::make_unique<Impl>(Impl{side, key, std::move(identity)})) {
  const bool server = side == Side::kServer;
  SSL_CTX* context = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method());
  if (context == nullptr) openssl_failed("make a TLS context");
  impl_->context = context;
  SSL_CTX_set_app_data(context, impl_.get());
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context, 0);
  if (server) {
    SSL_CTX_set_psk_find_session_callback(context, &Impl::find_session);
  } else {
    SSL_CTX_set_psk_use_session_callback(context, &Impl::use_session);
    // No certificate is trusted, if the server has one instead of the key.
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  }
  if (SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(context, kCipher) != 1 ||
      RAND_bytes(impl_->decoy_key.data(), static_cast<int>(impl_->decoy_key.size())) != 1) {
    SSL_CTX_free(std::exchange(impl_->context, nullptr));
    openssl_failed("use TLS 1.3 with TLS_AES_128_GCM_SHA256");
  }
}

SecureContext::~SecureContext() {
  SSL_CTX_free(impl_->context);
}

// ---------------------------------------------------------------- SecureChannel

struct SecureChannel::Session {
  SSL* ssl;
  BIO* from_peer;  // owned by ssl, as is the next
  BIO* to_peer;
  ~Session() { SSL_free(ssl); }
};

std::unique_ptr<SecureChannel> SecureContext::open() {
  SSL* ssl = SSL_new(impl_->context);
  BIO* from_peer = BIO_new(BIO_s_mem());
  BIO* to_peer = BIO_new(BIO_s_mem());
  if (ssl == nullptr || from_peer == nullptr || to_peer == nullptr) {
    SSL_free(ssl);
    BIO_free(from_peer);
    BIO_free(to_peer);
    openssl_failed("open a TLS connection");
  }
  BIO_set_mem_eof_return(from_peer, -1);  // empty means "no bytes yet", not end of file
  SSL_set_bio(ssl, from_peer, to_peer);
  if (impl_->side == Side::kServer) {
    SSL_set_accept_state(ssl);
  } else {
    SSL_set_connect_state(ssl);
  }
  auto session = std::make_unique<SecureChannel::Session>(ssl, from_peer, to_peer);
  return std::unique_ptr<SecureChannel>(new SecureChannel(std::move(session)));
}

SecureChannel::SecureChannel(std::unique_ptr<Session> session) : session_(std::move(session)) {}

SecureChannel::~SecureChannel() {
  OPENSSL_cleanse(waiting_.data(), waiting_.size());
}

void SecureChannel::flush(std::string& wire) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(session_->to_peer, &data);
  if (size <= 0) return;
  wire.append(data, static_cast<std::size_t>(size));
  (void)BIO_reset(session_->to_peer);
}

bool SecureChannel::fail(int result, const char* what) {
  const int kind = SSL_get_error(session_->ssl, result);
  if (kind == SSL_ERROR_WANT_READ || kind == SSL_ERROR_WANT_WRITE) return true;
  if (kind == SSL_ERROR_ZERO_RETURN) {
    problem_ = "the connection was closed";
    return false;
  }
  const unsigned long error = ERR_peek_error();
  const int reason = ERR_GET_REASON(error);
  // Our own client gets an alert during the handshake only if its binder did not verify; which
  // alert depends on the version of OpenSSL.
  const bool alert = !established_ && reason >= SSL_AD_REASON_OFFSET;
  wrong_key_ =
      ERR_GET_LIB(error) == ERR_LIB_SSL && (alert || reason == SSL_R_BINDER_DOES_NOT_VERIFY);
  const char* detail = ERR_reason_error_string(error);
  problem_ = fmt::format("{} failed ({})", what, detail != nullptr ? detail : "no reason given");
  return false;
}

void SecureChannel::start(std::string& wire) {
  std::string nothing;
  advance(nothing);
  flush(wire);
}

bool SecureChannel::advance(std::string& plain) {
  ERR_clear_error();
  if (!established_) {
    const int result = SSL_do_handshake(session_->ssl);
    if (result != 1) return fail(result, "the TLS handshake");
    // OpenSSL treats a handshake with a pre-shared key as a resumption.
    if (SSL_session_reused(session_->ssl) != 1) {
      problem_ = "the TLS handshake did not use the secret";
      return false;
    }
    established_ = true;
    const std::string waiting = std::exchange(waiting_, {});
    if (!waiting.empty())
      SSL_write(session_->ssl, waiting.data(), static_cast<int>(waiting.size()));
  }
  std::array<char, 16u << 10> buffer;
  for (;;) {
    std::size_t n = 0;
    ERR_clear_error();
    if (const int result = SSL_read_ex(session_->ssl, buffer.data(), buffer.size(), &n);
        result != 1)
      return fail(result, "decryption");
    plain.append(buffer.data(), n);
  }
}

bool SecureChannel::receive(std::string_view bytes, std::string& plain, std::string& wire) {
  if (!problem_.empty()) return false;
  if (!established_) {
    handshake_bytes_ += bytes.size();
    if (handshake_bytes_ > kMaxHandshakeBytes) {
      problem_ = "the TLS handshake is too long";
      return false;
    }
  }
  std::size_t taken = 0;
  if (BIO_write_ex(session_->from_peer, bytes.data(), bytes.size(), &taken) != 1 ||
      taken != bytes.size()) {
    problem_ = "out of memory";
    return false;
  }
  const bool good = advance(plain);
  flush(wire);
  return good;
}

void SecureChannel::send(std::string_view plain, std::string& wire) {
  if (!problem_.empty() || plain.empty()) return;
  if (!established_) {
    waiting_ += plain;
    return;
  }
  ERR_clear_error();
  std::size_t taken = 0;
  // A memory BIO takes all bytes or none.
  if (const int result = SSL_write_ex(session_->ssl, plain.data(), plain.size(), &taken);
      result != 1)
    fail(result, "encryption");
  flush(wire);
}

}  // namespace lockstep
