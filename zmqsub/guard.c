// The guard bounds the memory that a peer can make libzmq hold.
//
// libzmq's own limits count whole messages (ZMQ_RCVHWM) and the bytes of one frame (ZMQ_MAXMSGSIZE). A message of endless frames
// exceeds neither: libzmq keeps it until its last frame, and a frame of two bytes on the wire takes 64 bytes of memory. libzmq also
// limits neither the bytes of waiting messages nor the size of a handshake.
//
// libzmq reads its connections with recv. This file defines recv, connect and close. The linker prefers them to the C library's, with
// libzmq linked statically or dynamically. They make the same system calls as the C library. In libzmq's own threads they also parse
// the frame headers of each connection that libzmq made, in libzmq's read buffer. If a connection exceeds a bound, recv fails with
// ECONNRESET, and libzmq ends the connection. The guard costs no system call and no copy.
//
// Source of the formats: ZMTP 3.1, https://rfc.zeromq.org/spec/37/. libzmq reads it in zmtp_engine.cpp and v2_decoder.cpp.
#include "guard.h"

#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_RELAXED)
#define STORE(x, v) __atomic_store_n(&(x), (v), __ATOMIC_RELAXED)
#define ADD(x, n) __atomic_fetch_add(&(x), (n), __ATOMIC_RELAXED)
#define SUBTRACT(x, n) __atomic_fetch_sub(&(x), (n), __ATOMIC_RELAXED)

// An account outlives its connections, because libzmq keeps the messages of a connection that ended.
struct zmqsub_account {
	uint64_t address; // a hash of it; guarded by lock
	uint64_t cut;     // number of its latest connection that the guard ended; atomic
	int reason;       // why; atomic
	// Written by the thread that reads the connection.
	_Alignas(64) zmqsub_amount came;
	// Written by the receiver: one thread at a time, unless two sockets have the same address.
	_Alignas(64) zmqsub_amount took;
};

// peer is one connection. Only the libzmq I/O thread of the connection uses the fields that are not atomic.
typedef struct {
	uint64_t connection;     // its number, also after its end; 0: there was none; atomic
	int open;                // it has not ended
	zmqsub_account *account; // atomic

	enum zmqsub_cut cut; // why the guard ended it, if it did

	unsigned greeting;       // bytes of the greeting so far
	unsigned char header[9]; // of the current frame
	unsigned got;            // bytes of header so far
	uint64_t left;           // bytes of the current frame yet to come
	unsigned parts;          // frames of the current message so far
	uint64_t content, cost;  // bytes of the current message, without and with libzmq's cost of frames
	uint64_t counted;        // bytes of cost that all includes
} peer;

enum { GREETING = 64, PAGE = 1024, PAGES = 1024, ACCOUNTS = 1 << 16, COUNT_AT = 64 << 10 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // guards the creation of pages and accounts
static peer *pages[PAGES];                                // by descriptor; atomic
static zmqsub_account accounts[ACCOUNTS];                 // hash table by address, with linear probing
static uint64_t connections;                              // made so far; atomic
static uint64_t greetings;                                // complete ones, of all connections; atomic
static uint64_t all;                                      // waiting bytes of all accounts and of incomplete messages; atomic

static peer *peer_of(int fd) {
	if (fd < 0 || fd >= PAGE * PAGES)
		return NULL;
	peer *page = __atomic_load_n(&pages[fd / PAGE], __ATOMIC_ACQUIRE);
	return page ? &page[fd % PAGE] : NULL;
}

// of_libzmq returns whether this is a thread of libzmq, which names its threads.
static int of_libzmq(void) {
	static __thread signed char known; // 0: not asked yet
	if (!known) {
		char name[16] = "";
		known = prctl(PR_GET_NAME, name) == 0 && strncmp(name, "ZMQbg", 5) == 0 ? 1 : -1;
	}
	return known > 0;
}

static uint64_t hash(uint64_t h, const void *bytes, size_t n) { // FNV-1a
	for (const unsigned char *b = bytes; n > 0; b++, n--)
		h = (h ^ *b) * 0x100000001b3;
	return h;
}

static const uint64_t hash_start = 0xcbf29ce484222325;

// address_hash returns the hash of an IPv6 or IPv4-mapped address and a port, both in network byte order.
static uint64_t address_hash(const void *ip, const void *port) { return hash(hash(hash_start, port, 2), ip, 16); }

static uint64_t sockaddr_hash(const struct sockaddr *address, socklen_t length) {
	if (address->sa_family == AF_INET6) {
		const struct sockaddr_in6 *in = (const struct sockaddr_in6 *)address;
		return address_hash(&in->sin6_addr, &in->sin6_port);
	}
	if (address->sa_family == AF_INET) {
		const struct sockaddr_in *in = (const struct sockaddr_in *)address;
		unsigned char mapped[16] = {[10] = 0xff, [11] = 0xff};
		memcpy(mapped + 12, &in->sin_addr, 4);
		return address_hash(mapped, &in->sin_port);
	}
	return hash(hash_start, address, length);
}

// account_with returns the account of the address with this hash. If the table is full, new addresses share an account.
// The caller holds lock.
static zmqsub_account *account_with(uint64_t h) {
	h |= 1; // 0 marks a free entry
	unsigned at = (h >> 16) % ACCOUNTS;
	for (int tries = 0; tries < 64; tries++, at = (at + 1) % ACCOUNTS) {
		if (accounts[at].address == 0)
			accounts[at].address = h;
		if (accounts[at].address == h)
			break;
	}
	return &accounts[at];
}

// uncount subtracts the incomplete message from all.
static void uncount(peer *p) {
	SUBTRACT(all, p->counted);
	p->counted = 0;
}

// begin starts to follow a connection. It returns -1 if the descriptor is too large or memory is short.
static int begin(int fd, const struct sockaddr *address, socklen_t length) {
	if (fd < 0 || fd >= PAGE * PAGES)
		return -1;
	pthread_mutex_lock(&lock);
	if (!pages[fd / PAGE])
		__atomic_store_n(&pages[fd / PAGE], calloc(PAGE, sizeof(peer)), __ATOMIC_RELEASE);
	peer *p = peer_of(fd);
	if (p) {
		uncount(p);
		p->cut = ZMQSUB_CUT_NOT;
		p->greeting = p->got = p->parts = 0;
		p->left = p->content = p->cost = 0;
		STORE(p->account, account_with(sockaddr_hash(address, length)));
		STORE(p->connection, ADD(connections, 1) + 1);
		p->open = 1;
	}
	pthread_mutex_unlock(&lock);
	return p ? 0 : -1;
}

// frame checks the complete header of the current frame.
static enum zmqsub_cut frame(peer *p) {
	unsigned char flags = p->header[0];
	int more = flags & 1, command = flags & 4;
	uint64_t size = 0;
	for (unsigned i = 1; i < p->got; i++)
		size = size << 8 | p->header[i];
	if (command && (more || size > ZMQSUB_COMMAND_BYTES))
		return ZMQSUB_CUT_COMMAND;
	if (++p->parts > ZMQSUB_MESSAGE_PARTS)
		return ZMQSUB_CUT_PARTS;
	if (size > ZMQSUB_MESSAGE_BYTES || (p->content += size) > ZMQSUB_MESSAGE_BYTES)
		return ZMQSUB_CUT_BYTES;
	p->cost += size + ZMQSUB_FRAME_COST;
	if (p->cost - p->counted > COUNT_AT) {
		ADD(all, p->cost - p->counted);
		p->counted = p->cost;
	}
	zmqsub_account *a = p->account;
	uint64_t waits = a->came.bytes - LOAD(a->took.bytes) + p->cost;
	if (waits > ZMQSUB_CUT || (waits > ZMQSUB_SMALL_CUT && LOAD(all) > ZMQSUB_ALL_CUT))
		return ZMQSUB_CUT_BACKLOG;
	p->left = size;
	return ZMQSUB_CUT_NOT;
}

// ended ends the current frame, and the message if that was its last frame.
static void ended(peer *p) {
	p->got = 0;
	if (p->header[0] & 1)
		return;
	zmqsub_account *a = p->account;
	ADD(all, p->cost - p->counted);
	ADD(a->came.bytes, p->cost); // atomic, because two connections may have the same address
	ADD(a->came.messages, 1);
	p->parts = 0;
	p->content = p->cost = p->counted = 0;
}

// follow parses the next bytes of a connection.
static enum zmqsub_cut follow(peer *p, const unsigned char *b, size_t n) {
	for (; p->greeting < GREETING && n > 0; p->greeting++, b++, n--) {
		// The signature and the version. Versions before 3 have another frame format.
		if ((p->greeting == 0 && *b != 0xff) || (p->greeting == 9 && !(*b & 1)) || (p->greeting == 10 && *b < 3))
			return ZMQSUB_CUT_GREETING;
		if (p->greeting == GREETING - 1)
			ADD(greetings, 1);
	}
	while (n > 0) {
		if (p->left == 0) {
			p->header[p->got++] = *b++;
			n--;
			if (p->got < (p->header[0] & 2 ? 9 : 2))
				continue;
			enum zmqsub_cut cut = frame(p);
			if (cut)
				return cut;
		} else {
			size_t k = n < p->left ? n : p->left;
			b += k;
			n -= k;
			p->left -= k;
		}
		if (p->left == 0)
			ended(p);
	}
	return ZMQSUB_CUT_NOT;
}

ssize_t recv(int fd, void *buffer, size_t size, int flags) {
	ssize_t n = syscall(SYS_recvfrom, fd, buffer, size, flags, NULL, NULL);
	peer *p;
	if (n <= 0 || !of_libzmq() || !(p = peer_of(fd)) || !p->open)
		return n;
	if (!p->cut)
		p->cut = follow(p, buffer, n);
	if (!p->cut)
		return n;
	STORE(p->account->reason, p->cut);
	STORE(p->account->cut, p->connection);
	errno = ECONNRESET;
	return -1;
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
	if (of_libzmq() && begin(fd, address, length)) {
		errno = ENOBUFS;
		return -1;
	}
	return syscall(SYS_connect, fd, address, length);
}

int close(int fd) {
	peer *p;
	if (of_libzmq() && (p = peer_of(fd)) && p->open) {
		uncount(p);
		p->open = 0;
	}
	return syscall(SYS_close, fd);
}

zmqsub_account *zmqsub_account_at(const unsigned char ip[16], const unsigned char port[2]) {
	pthread_mutex_lock(&lock);
	zmqsub_account *a = account_with(address_hash(ip, port));
	pthread_mutex_unlock(&lock);
	return a;
}

zmqsub_account *zmqsub_account_of(int fd) {
	peer *p = peer_of(fd);
	return p ? LOAD(p->account) : NULL;
}

zmqsub_amount zmqsub_came(zmqsub_account *a) {
	// Load messages before bytes, so that the bytes include those of all messages.
	uint64_t messages = __atomic_load_n(&a->came.messages, __ATOMIC_ACQUIRE);
	return (zmqsub_amount){messages, LOAD(a->came.bytes)};
}

// take adds n to *took, but does not exceed came. It returns the number added.
static uint64_t take(uint64_t *took, uint64_t n, uint64_t came) {
	uint64_t before = LOAD(*took), k;
	do {
		if (before >= came)
			return 0;
		k = n < came - before ? n : came - before;
	} while (!__atomic_compare_exchange_n(took, &before, before + k, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
	return k;
}

void zmqsub_took(zmqsub_account *a, zmqsub_amount n) {
	zmqsub_amount came = zmqsub_came(a);
	SUBTRACT(all, take(&a->took.bytes, n.bytes, came.bytes));
	take(&a->took.messages, n.messages, came.messages);
}

void zmqsub_took_all(zmqsub_account *a, zmqsub_amount came) {
	SUBTRACT(all, take(&a->took.bytes, UINT64_MAX, came.bytes));
	take(&a->took.messages, UINT64_MAX, came.messages);
}

uint64_t zmqsub_too_much(zmqsub_account *a) {
	zmqsub_amount came = zmqsub_came(a);
	uint64_t waits = came.bytes - LOAD(a->took.bytes);
	if (waits <= ZMQSUB_FULL && (waits <= ZMQSUB_SMALL_FULL || LOAD(all) <= ZMQSUB_ALL_FULL))
		return 0;
	uint64_t messages = came.messages - LOAD(a->took.messages);
	return messages ? messages : 1;
}

uint64_t zmqsub_connections(void) { return LOAD(connections); }

uint64_t zmqsub_latest_cut(zmqsub_account *a, enum zmqsub_cut *reason) {
	*reason = LOAD(a->reason);
	return LOAD(a->cut);
}

uint64_t zmqsub_greetings(void) { return LOAD(greetings); }
