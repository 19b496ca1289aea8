// Package apiserver starts a real Kubernetes API server with its etcd for tests, and nothing else of a cluster.
//
// It owns both processes, their ports on loopback, their certificates, data and logs. It also plays the kubelet for
// pods that tests create (Pod): a pod's address is on loopback, where the test itself may listen. It never schedules,
// starts a container or does a controller's work. One goroutine starts and stops the server; all other methods are safe
// for concurrent use.
package apiserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"

	"kvepp/test/harness/process"
)

// Config configures a Server.
type Config struct {
	Programs string   // folder with etcd and kube-apiserver; KVEPP_KUBE, which test/tools/install.sh kube prints
	Dir      string   // for data, certificates, logs and kubeconfigs; empty: a new temporary folder
	Flags    []string // further flags of kube-apiserver
}

// Server is a running API server. It authorizes by RBAC.
type Server struct {
	// Kubeconfig is a kubeconfig file with all rights.
	Kubeconfig string
	// Client and Dynamic are clients with all rights and without a limit of requests per second.
	Client  kubernetes.Interface
	Dynamic dynamic.Interface

	cfg       Config
	dir       string
	temp      bool
	url       string
	port      int
	etcdPorts int // the first of two ports: for clients and for peers
	ca        []byte
	config    *rest.Config
	mapper    *restmapper.DeferredDiscoveryRESTMapper
	etcd, api *process.Process
	closing   sync.Once
}

// Start starts etcd and the API server, and waits until it is ready. After an error no process is left.
func Start(ctx context.Context, cfg Config) (_ *Server, err error) {
	if cfg.Programs == "" {
		return nil, errors.New("apiserver: Kubernetes is not installed: run this through make (make test-kube), " +
			"or set KVEPP_KUBE to the output of test/tools/install.sh kube")
	}
	s := &Server{cfg: cfg, dir: cfg.Dir}
	if s.dir == "" {
		if s.dir, err = os.MkdirTemp("", "kvepp-apiserver-"); err != nil {
			return nil, err
		}
		s.temp = true
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	first, err := process.Ports(3)
	if err != nil {
		return nil, err
	}
	s.port, s.etcdPorts = first, first+1
	s.url = fmt.Sprintf("https://127.0.0.1:%d", s.port)
	if err := s.certify(); err != nil {
		return nil, err
	}
	if s.config, err = clientcmd.BuildConfigFromFlags("", s.Kubeconfig); err != nil {
		return nil, err
	}
	s.config.QPS = -1
	clients, err := kubernetes.NewForConfig(s.config)
	if err != nil {
		return nil, err
	}
	s.Client = clients
	if s.Dynamic, err = dynamic.NewForConfig(s.config); err != nil {
		return nil, err
	}
	s.mapper = restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(clients.Discovery()))
	if err := s.startEtcd(ctx); err != nil {
		return nil, err
	}
	return s, s.Serve(ctx)
}

func (s *Server) etcdURL() string { return fmt.Sprintf("http://127.0.0.1:%d", s.etcdPorts) }

func (s *Server) startEtcd(ctx context.Context) (err error) {
	peers := fmt.Sprintf("http://127.0.0.1:%d", s.etcdPorts+1)
	s.etcd, err = process.Start(
		s.dir,
		"etcd",
		nil,
		filepath.Join(s.cfg.Programs, "etcd"),
		"--data-dir",
		filepath.Join(s.dir, "etcd"),
		"--listen-client-urls",
		s.etcdURL(),
		"--advertise-client-urls",
		s.etcdURL(),
		"--listen-peer-urls",
		peers,
		"--initial-advertise-peer-urls",
		peers,
		"--initial-cluster",
		"default="+peers,
		"--unsafe-no-fsync",
		"--log-level",
		"warn",
	)
	if err != nil {
		return fmt.Errorf("apiserver: %w", err)
	}
	return process.Up(ctx, "etcd", process.Healthy(s.etcdURL()), s.etcd)
}

// Serve starts the API server and waits until it is ready. After Stop it starts it again, at the same port and with the
// same data.
func (s *Server) Serve(ctx context.Context) (err error) {
	file := func(name string) string { return filepath.Join(s.dir, name) }
	s.api, err = process.Start(
		s.dir,
		"kube-apiserver",
		nil,
		append([]string{filepath.Join(s.cfg.Programs, "kube-apiserver"),
			"--etcd-servers", s.etcdURL(), "--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1",
			"--secure-port", fmt.Sprint(s.port),
			"--endpoint-reconciler-type", "none", // endpoints of the service "kubernetes" must not be on loopback
			"--cert-dir", s.dir, "--tls-cert-file", file("server.crt"), "--tls-private-key-file", file("server.key"),
			"--client-ca-file", file("ca.crt"),
			"--service-account-key-file", file("accounts.key"), "--service-account-signing-key-file",
			file("accounts.key"),
			"--service-account-issuer", "https://kubernetes.default.svc", "--service-cluster-ip-range", "10.96.0.0/16",
			"--authorization-mode", "RBAC",
			// It needs a service account in each namespace, which a controller creates.
			"--disable-admission-plugins", "ServiceAccount",
			"--allow-privileged", "--profiling=false"}, s.cfg.Flags...)...)
	if err != nil {
		return fmt.Errorf("apiserver: %w", err)
	}
	return process.Up(ctx, "the API server", func() error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err := s.Client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	}, s.api, s.etcd)
}

// Stop kills the API server and keeps its data. Serve starts it again.
func (s *Server) Stop() { s.api.Kill() }

// Pause stops the API server's work, as an overloaded machine does: connections stay and new ones are accepted, but no
// request gets a response until Resume.
func (s *Server) Pause() { s.api.Signal(syscall.SIGSTOP) }

// Resume ends Pause.
func (s *Server) Resume() { s.api.Signal(syscall.SIGCONT) }

// Close ends both processes. A folder that the caller named keeps its files.
func (s *Server) Close() {
	s.closing.Do(func() {
		s.api.Kill()
		s.etcd.Kill()
		if s.temp {
			os.RemoveAll(s.dir)
		}
	})
}
