// TLS 1.3 with a pre-shared key and no certificates, for the link between launchers under
// --secret-file.
//
// Both sides prove that they know the secret before any message is parsed: the client by the binder
// of its ClientHello, the server by its Finished. Every handshake includes a Diffie-Hellman
// exchange, so a secret that leaks later does not decrypt recorded connections. The PSK identity is
// the run id and is sent in clear text.
//
// A channel has no socket: it turns bytes into bytes, and its owner sends and receives them. So it
// never blocks, and tests connect two of them directly.
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

// 32 bytes derived from the contents of a secret file; the destructor erases them.
class SecretKey {
 public:
  // Ignores white space around the secret. Throws UsageError unless the file is a regular file of
  // this user (or root) that nobody else may read, with 16 to 4096 bytes.
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

// The key and settings that the channels of one launcher share.
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

  // All three append to `wire` the bytes to send to the peer, also after an error. A client calls
  // start() once; a server starts with the client's first bytes.
  void start(std::string& wire);
  // Decrypts the peer's bytes and appends the result to `plain`. False: see problem().
  bool receive(std::string_view bytes, std::string& plain, std::string& wire);
  // Encrypts `plain`, or keeps it until the handshake is complete.
  void send(std::string_view plain, std::string& wire);

  bool established() const { return established_; }
  const std::string& problem() const { return problem_; }
  // The peer has another key, or another identity, which cannot be distinguished.
  bool wrong_key() const { return wrong_key_; }

 private:
  friend class SecureContext;
  struct Session;
  explicit SecureChannel(std::unique_ptr<Session> session);
  bool advance(std::string& plain);
  bool fail(int result, const char* what);
  void flush(std::string& wire);

  std::unique_ptr<Session> session_;
  std::string waiting_;  // sent when the handshake is complete
  std::size_t handshake_bytes_ = 0;
  bool established_ = false;
  bool wrong_key_ = false;
  std::string problem_;
};

}  // namespace lockstep
