// The launchers' link under --secret-file: TLS 1.3 with a pre-shared key, no certificates.
//
// Both sides prove that they hold the secret before a single byte of a message is parsed: the
// client by the binder of its ClientHello, the server by its Finished. A fresh Diffie-Hellman
// exchange is part of every handshake, so a secret that leaks later does not open recorded
// connections. The PSK identity is the run id and travels in clear text.
//
// A channel has no socket: bytes go in and come out, and the owner moves them. That keeps it
// non-blocking and lets a test connect two of them by hand.
//
//   SecureContext context(SecureContext::Side::kServer, SecretKey::from_file(path), run_id);
//   auto channel = context.open();
//   if (!channel->receive(bytes, plain, wire)) close(channel->problem());
//
// Called by the supervisor's one thread; a channel must not outlive its context.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep {

// 32 bytes derived from the contents of a secret file; erased when it is destroyed.
class SecretKey {
 public:
  // White space around the secret does not count. Throws UsageError unless it is a regular file of
  // this user (or root) that nobody else may read, with at least 16 and at most 4096 bytes.
  static SecretKey from_file(const std::string& path);
  explicit SecretKey(std::string_view secret);
  ~SecretKey();
  SecretKey(const SecretKey&) = default;
  SecretKey& operator=(const SecretKey&) = default;

  const std::array<unsigned char, 32>& bytes() const { return bytes_; }

 private:
  std::array<unsigned char, 32> bytes_{};
};

class SecureChannel;

// What the channels of one launcher share.
class SecureContext {
 public:
  enum class Side { kServer, kClient };
  SecureContext(Side side, SecretKey key, std::string identity);
  ~SecureContext();
  SecureContext(const SecureContext&) = delete;
  SecureContext& operator=(const SecureContext&) = delete;

  std::unique_ptr<SecureChannel> open();

 private:
  friend class SecureChannel;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class SecureChannel {
 public:
  ~SecureChannel();
  SecureChannel(const SecureChannel&) = delete;
  SecureChannel& operator=(const SecureChannel&) = delete;

  // Appends to `wire` what must be sent to the peer, even when it returns false. A client calls
  // start() once; a server starts with the client's first bytes.
  void start(std::string& wire);
  // Takes bytes from the peer and appends the decrypted ones to `plain`. False: see problem().
  bool receive(std::string_view bytes, std::string& plain, std::string& wire);
  // Before the handshake is complete, `plain` waits for it.
  void send(std::string_view plain, std::string& wire);

  bool established() const { return established_; }
  const std::string& problem() const { return problem_; }
  // The peer has another key (or another identity, which looks the same).
  bool wrong_key() const { return wrong_key_; }

 private:
  friend class SecureContext;
  struct Session;
  explicit SecureChannel(std::unique_ptr<Session> session);
  bool advance(std::string& plain);
  bool fail(int result, const char* what);
  void flush(std::string& wire);

  std::unique_ptr<Session> session_;
  std::string waiting_;  // to be sent when the handshake is complete
  std::size_t handshake_bytes_ = 0;
  bool established_ = false;
  bool wrong_key_ = false;
  std::string problem_;
};

}  // namespace lockstep
